"""The named stages of a step, and a way for tests to make any of them fail without touching its code.

with je.inject_fault(je.Stage.PACK, MemoryError("no room")) as fault:
    engine.run()                      # the step fails while it is being packed
assert fault.fired
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Iterator

from jaxengine.checks import require_count


class Stage(enum.Enum):
    """Where a step can be made to fail, in the order in which a step passes them."""

    PLAN = "plan"
    CHECKPOINT = "checkpoint"
    PACK = "pack"
    EXECUTE = "execute"
    RESERVE = "reserve"
    MASKS = "masks"
    LOGITS = "logits"
    SAMPLE = "sample"
    VALIDATE = "validate"
    BOOKKEEPING = "bookkeeping"
    EVENTS = "events"
    PUBLISH = "publish"


@dataclasses.dataclass(eq=False)
class Fault:
    """An error that waits at a stage.

    Attributes:
        stage: Where.
        error: What is raised there, once.
        skip: How many times the stage is passed unharmed first.
        fired: Whether it was raised.
    """

    stage: Stage
    error: Exception
    skip: int = 0
    fired: bool = False


_armed: contextvars.ContextVar[tuple[Fault, ...]] = contextvars.ContextVar("armed", default=())


@contextlib.contextmanager
def inject_fault(stage: Stage, error: Exception, *, skip: int = 0) -> Iterator[Fault]:
    """Raises `error` the next time that a step of this thread passes `stage`; nest them for several faults.

    Args:
        stage: Where.
        error: A `RetryableStepError` says that the step may be tried again; a `MemoryError` stands for memory that ran
            out; anything else for a failure that the engine doesn't know.
        skip: How many times the stage is passed unharmed first.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `skip` is negative.
    """
    if not isinstance(stage, Stage):
        raise TypeError(f"the stage is {stage!r}; give a Stage")
    if not isinstance(error, Exception):
        raise TypeError(f"the error is {error!r}; give an exception, made and not raised")
    skip = require_count("skip", skip)
    fault = Fault(stage, error, skip)
    token = _armed.set((*_armed.get(), fault))
    try:
        yield fault
    finally:
        _armed.reset(token)


def reach(stage: Stage) -> None:
    """Marks that a step has come to `stage`; raises what waits there."""
    for fault in _armed.get():
        if fault.stage is stage and not fault.fired:
            if fault.skip:
                fault.skip -= 1
                continue
            fault.fired = True
            raise fault.error
