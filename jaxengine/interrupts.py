"""Keeps Ctrl-C out of the few lines in which a new state exists but is not yet held by anybody."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delivers a SIGINT that comes inside the block at its end; off the main thread there is nothing to defer."""
    previous = signal.getsignal(signal.SIGINT)
    # A handler that was not installed from Python could not be put back.
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    pending: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: pending.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)
