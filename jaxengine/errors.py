"""What the engine raises, by who is at fault: the caller, the moment, or the engine.

A wrong argument is a plain `ValueError` or `TypeError`; the classes here are for what no argument shows. A `StepError`
is a step that came to nothing: its class says how much of the engine it cost.
"""

from __future__ import annotations


class RequestStateError(RuntimeError):
    """The request is not in a state that allows the call; nothing was changed."""


class SpentStateError(RuntimeError):
    """A state value was used after a commit had taken its store over."""


class StaleTransactionError(RuntimeError):
    """A transaction does not belong to the state it was offered to; the state is untouched and usable."""


class EngineError(RuntimeError):
    """The engine met a failure that it cannot recover from, or was closed; it accepts no more work."""


class StepError(RuntimeError):
    """A step failed.

    Attributes:
        request_ids: The requests known to be behind it; empty if that is unknown.
    """

    def __init__(self, message: str, request_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class RetryableStepError(StepError):
    """A step failed before it was committed; the state is untouched and the step may be tried again."""


class RequestFailure(StepError):
    """Some requests of a step can't go on and never will; the state is untouched, and their turns end as failed."""


class ExecutionCapacityError(StepError):
    """Memory ran out before the step was committed; the state is untouched and the step may be tried again."""


class ExecutionError(StepError):
    """A step failed before the device write for a reason that the engine doesn't know; the state is untouched."""


class ContractError(StepError):
    """The engine contradicts itself: a plan that fitted cannot be carried out. The state is untouched."""


class StoreLostError(StepError):
    """A commit failed from its device write on, or the device lost the KV pool: the state is gone."""
