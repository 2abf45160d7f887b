"""What the engine raises, by who is at fault: the caller, the moment, or the engine.

A wrong argument is a plain `ValueError` or `TypeError`; the classes here are for what no argument shows.
"""

from __future__ import annotations


class RequestStateError(RuntimeError):
    """The request is not in a state that allows the call; nothing was changed."""


class SpentStateError(RuntimeError):
    """A state value was used after a commit had taken its store over."""


class StaleTransactionError(RuntimeError):
    """A transaction does not belong to the state it was offered to; the state is untouched and usable."""


class RetryableStepError(RuntimeError):
    """A step failed before it was committed; the state is untouched and the step may be tried again.

    Attributes:
        request_ids: The requests whose rows failed.
    """

    def __init__(self, message: str, request_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class EngineError(RuntimeError):
    """The engine met a failure that it cannot recover from, or was closed; it accepts no more work."""
