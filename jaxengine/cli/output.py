"""Where words go: generated text to standard output at once, notes to standard error."""

import sys


def write_text(piece: str) -> None:
    """Writes a piece of generated text and flushes it, so that it is seen when it is made."""
    if piece:
        sys.stdout.write(piece)
        sys.stdout.flush()


def say(sentence: str) -> None:
    """Tells the user something that is not generated text."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
