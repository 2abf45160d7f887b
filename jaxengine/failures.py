"""What a failed step costs: a pure function from the state before it to the state after.

The step itself has left nothing behind. What is decided here is who hears of it, whether a request or the whole engine
ends, and, under `failure_policy="isolate"`, which rows are tried alone next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxengine.errors import (
    ContractError,
    ExecutionCapacityError,
    ExecutionError,
    RequestFailure,
    RetryableStepError,
    StepError,
)
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason
from jaxengine.planning import StepOutcome, StepPlan
from jaxengine.requests import finish_turn, publish
from jaxengine.state import (
    FAILED_STEPS,
    Control,
    EngineState,
    Lease,
    RequestStatus,
    StoredFailure,
    replace_rows,
    row_of,
)

LIVE = (RequestStatus.QUEUED, RequestStatus.ACTIVE)


def outcome_of(error: StepError) -> StepOutcome:
    """What a step that raised `error` came to."""
    match error:
        case RetryableStepError() | RequestFailure():
            return StepOutcome.RETRYABLE_BATCH_ABORT
        case ExecutionCapacityError():
            return StepOutcome.EXECUTION_CAPACITY_EXCEEDED
        case ContractError():
            return StepOutcome.EXECUTION_CONTRACT_FAILURE
        case _:
            return StepOutcome.FATAL_EXECUTION_FAILURE


def after_blocked(state: EngineState, plan: StepPlan) -> EngineState:
    """Reports that requests wait and none can run."""
    return _announce(
        state,
        EngineEventFlags.CAPACITY_BLOCKED,
        EngineErrorCode.CAPACITY_DEFERRED,
        f"{plan.deferred} requests wait for blocks or places; "
        "close a finished request to free some, or a live one if none is finished",
    )


def after_failure(state: EngineState, request_ids: Sequence[int], error: StepError) -> EngineState:
    """Reports a failed step and decides how to go on.

    Args:
        state: The state that the step was made from.
        request_ids: Whose rows the step had; empty if it failed before there was a plan.
        error: What it raised.

    Returns:
        The state to go on from. Its `control.failure` is set if the engine has to stop.
    """
    control = state.control
    counters = control.counters.copy()
    counters[FAILED_STEPS] += 1
    state = state.replace(control=control.replace(counters=counters))  # type: ignore[attr-defined]
    detail = str(error)
    if isinstance(error, RequestFailure):
        control = state.control
        for request_id in error.request_ids:
            control = _fail(control, row_of(control, request_id), EngineErrorCode.GUIDANCE_FAILURE, detail)
        return state.replace(control=control)  # type: ignore[attr-defined]
    if isinstance(error, RetryableStepError):
        state = _announce(state, EngineEventFlags.RETRYABLE, EngineErrorCode.RETRYABLE_EXECUTION, detail)
        return _count_against(state, error.request_ids, detail)
    if isinstance(error, ExecutionCapacityError):
        return _announce(
            state, EngineEventFlags.CAPACITY_BLOCKED, EngineErrorCode.EXECUTION_CAPACITY_EXCEEDED, detail
        )
    isolate = state.control.config.failure_policy == "isolate"
    suspects = tuple(int(i) for i in request_ids)
    # A step without rows has nobody to find; it is tried again once.
    if isolate and isinstance(error, ExecutionError) and (suspects or () not in state.control.suspects):
        return _suspect(state, suspects, detail)
    contract = isinstance(error, ContractError)
    code = EngineErrorCode.ENGINE_CONTRACT_FAILURE if contract else EngineErrorCode.ENGINE_EXECUTION_FAILURE
    return _stop(state, code, detail)


def _announce(state: EngineState, flags: EngineEventFlags, code: EngineErrorCode, detail: str) -> EngineState:
    return publish(state, EventRecord(request_id=0, turn_id=0, flags=flags, error_code=code, detail=detail))


def _count_against(state: EngineState, request_ids: Sequence[int], detail: str) -> EngineState:
    """Counts a failed step against the live requests behind it; one that failed too often ends its turn."""
    control = state.control
    for request_id in request_ids:
        row = row_of(control, request_id)
        if row < 0 or control.requests.status[row] not in LIVE:
            continue
        failures = int(control.requests.failures[row]) + 1
        control = replace_rows(control, row, failures=failures)
        if failures > control.config.max_row_retries:
            control = _fail(control, row, EngineErrorCode.RETRYABLE_EXECUTION, detail)
    return state.replace(control=control)  # type: ignore[attr-defined]


def _suspect(state: EngineState, ids: tuple[int, ...], detail: str) -> EngineState:
    """The first failure of these rows is tried again as it was; the next one in halves, down to who fails alone."""
    state = _announce(state, EngineEventFlags.RETRYABLE, EngineErrorCode.RETRYABLE_EXECUTION, detail)
    control = state.control
    groups = control.suspects
    if not ids or not groups or not set(ids) <= set(groups[0]):
        groups = (ids, *groups)
    elif len(ids) == 1:
        control = _fail(control, row_of(control, ids[0]), EngineErrorCode.ENGINE_EXECUTION_FAILURE, detail)
        groups = control.suspects
    else:
        half = len(ids) // 2
        groups = (ids[:half], ids[half:], *groups[1:])
    return state.replace(control=control.replace(suspects=groups))  # type: ignore[attr-defined]


def _stop(state: EngineState, code: EngineErrorCode, detail: str) -> EngineState:
    """Stores the failure and ends every live turn once; with none, one event belongs to the engine as a whole."""
    control = state.control
    live = np.flatnonzero(np.isin(control.requests.status, LIVE))
    for row in live:
        control = _fail(control, int(row), code, detail)
    failure = StoredFailure(code, detail)
    # No step will read this store again; a fresh lease lets requests be closed and events drained all the same.
    store = state.store.replace(lease=Lease())  # type: ignore[attr-defined]
    control = control.replace(failure=failure, suspects=())  # type: ignore[attr-defined]
    state = EngineState(control, store)
    return state if len(live) else _announce(state, EngineEventFlags.FAILED, code, detail)


def _fail(control: Control, row: int, code: EngineErrorCode, detail: str) -> Control:
    return finish_turn(control, row, FinishReason.FAILED, code, detail)
