"""What ends a command early: one sentence for people and an exit status for scripts."""

USAGE, FAILURE, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
"""Exit statuses; the last two are those of a program that SIGINT or SIGPIPE ended (128 + the signal's number)."""


class CommandError(Exception):
    """The command can't be done; the message is one sentence, `status` the exit status."""

    def __init__(self, message: str, status: int = FAILURE) -> None:
        super().__init__(message)
        self.status = status
