"""A step is a value: execute a plan into a transaction, commit the transaction into the next state.

`execute` reads the committed state and stages everything the step made. Dropping the transaction is the rollback: no
code undoes anything. `commit` checks that the transaction still belongs to the state, builds the next control value,
and only then lets the one device write happen; nothing that can fail follows it. What fails is raised as a `StepError`
whose class says what it costs.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.errors import (
    ContractError,
    ExecutionCapacityError,
    ExecutionError,
    RetryableStepError,
    StaleTransactionError,
    StepError,
    StoreLostError,
)
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason, Usage
from jaxengine.faults import Stage, reach
from jaxengine.logs import LogTable
from jaxengine.model import Model, require_model
from jaxengine.planning import StepOutcome, StepPlan, plan_step
from jaxengine.programs import Destinations, ForwardResult, Programs, bucket_for, destinations, pack
from jaxengine.requests import finish_turn, free_without, without_suspects
from jaxengine.sizing import ran_out_of_memory
from jaxengine.state import (
    ADMISSIONS,
    DEFERRALS,
    PREEMPTIONS,
    STEPS,
    Control,
    EngineState,
    Lease,
    RequestStatus,
    Store,
    replace_rows,
    require_healthy,
    require_unspent,
    row_of,
    rows_of,
)
from jaxengine.windows import require_room_in_rings


@dataclasses.dataclass(eq=False)
class Fate:
    """Whether a transaction was committed; the one thing about it that changes."""

    committed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StagedStep:
    """What the device made of a plan.

    Attributes:
        result: Staged keys and values, logits float32[rows, vocab] and the chosen tokens, padded to the bucket.
        to: Where the staged tokens go.
        tokens: int32[plan rows], the chosen tokens on the host; they count only for rows that sample.
        programs: The programs that publish it.
    """

    result: ForwardResult
    to: Destinations
    tokens: np.ndarray
    programs: Programs


@dataclasses.dataclass(frozen=True, eq=False)
class Transaction:
    """A step that was executed and not committed.

    Attributes:
        plan: What was run.
        staged: What the device made; None if the plan had no rows.
        fate: Whether it was committed.
    """

    plan: StepPlan
    staged: StagedStep | None
    fate: Fate = dataclasses.field(default_factory=Fate)

    @property
    def logits(self) -> jax.Array:
        """float32[rows, vocab], each row's logits at its last token, in the plan's order."""
        if self.staged is None:
            raise ValueError("this transaction has no rows, so it has no logits")
        return self.staged.result.logits[: len(self.plan.index)]


def execute(model: Model, state: EngineState, plan: StepPlan) -> Transaction:
    """Runs a plan without changing anything that the state can read.

    Args:
        model: The model that the state was made for.
        state: The state that the plan was made from.
        plan: An executable plan, of outcome COMMITTED or UNSERVICEABLE_REQUEST.

    Returns:
        The transaction; drop it to roll the step back.

    Raises:
        TypeError: An argument is of another type.
        SpentStateError: A commit has taken the state over.
        EngineError: A failure has ended the engine's work.
        ValueError: The plan is not executable, or was made for another state or model.
        RetryableStepError: The logits of a row are not finite.
        ExecutionCapacityError: Memory ran out.
        ContractError: The plan's blocks are not those of the state, or a row is too long for the rings.
        ExecutionError: Anything else went wrong; all of these leave the state untouched.
        StoreLostError: The device lost the KV pool.
    """
    require_model(model)
    plan = require_executable(state, plan)
    control = state.control
    require_healthy(control)
    if model.decoder.identity != control.facts.identity:
        raise ValueError(
            "the state was made for another model; execute it with the model given to init_state"
        )
    if len(plan.index) == 0:
        return Transaction(plan, None)
    with _failures_of(state.store):
        return Transaction(plan, _run(model, state, plan))


def _run(model: Model, state: EngineState, plan: StepPlan) -> StagedStep:
    reach(Stage.CHECKPOINT)
    control, store = state.control, state.store
    reach(Stage.PACK)
    bucket = bucket_for(plan, control.config)
    batch = pack(control, plan, bucket)
    reach(Stage.EXECUTE)
    result = model.programs.forward(
        model.decoder.params, store.pages, store.block_table, store.fixed, batch, tile_size=bucket.tile_size
    )
    # The device is at work: whatever needs no result of it comes first.
    with _failures_of(store, unknown=ContractError):
        reach(Stage.RESERVE)
        _require_reservation(control, plan)
        require_room_in_rings(model.decoder.layers, store.pages, int(plan.num_tokens.max()))
        to = destinations(control, plan, bucket)
    reach(Stage.LOGITS)
    rows = len(plan.index)
    # Logits that no token is chosen from may be anything: where a prompt is cut must not matter.
    usable = np.asarray(result.usable)[:rows] | ~plan.samples
    if not usable.all():
        culprits = tuple(int(i) for i in plan.request_ids[~usable])
        names = ", ".join(map(str, culprits))
        raise RetryableStepError(
            f"the logits of request {names} are not finite; the step was dropped", culprits
        )
    reach(Stage.SAMPLE)
    return StagedStep(result, to, np.array(result.chosen)[:rows], model.programs)


class _failures_of:  # noqa: N801 - a context manager, used like a function
    """Raises what goes wrong inside as the `StepError` that it amounts to; `taken` if the store is being donated.

    A class, because a generator can't tell a StopIteration that it is to translate from its own end.
    """

    def __init__(
        self, store: Store, *, unknown: type[StepError] = ExecutionError, taken: bool = False
    ) -> None:
        self._store, self._unknown, self._taken = store, unknown, taken

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        if self._taken or _is_lost(self._store):
            raise StoreLostError(f"the step failed and took the KV pool with it: {error}") from error
        if isinstance(error, StepError):
            return
        if ran_out_of_memory(error):
            raise ExecutionCapacityError(f"memory ran out during the step: {error}") from error
        raise self._unknown(f"the step failed: {type(error).__name__}: {error}") from error


def _is_lost(store: Store) -> bool:
    """Whether the device freed the store, or failed in the write that should have made it and says so only now."""
    try:
        jax.block_until_ready((store.pages, store.block_table, store.fixed))
    except Exception:
        return True
    return False


def _require_reservation(control: Control, plan: StepPlan) -> None:
    """Raises `ContractError` unless the plan's blocks are the next ones of the pool and hold all of its tokens."""
    following = control.free_blocks[::-1][: int(plan.num_reserved.sum())]
    room = (control.blocks_held[plan.index] + plan.num_reserved) * control.config.block_size
    if not np.array_equal(plan.reserved, following) or (room < plan.past + plan.num_tokens).any():
        raise ContractError("the plan's blocks are not those that the pool has for it; plan with plan_step")


def commit(
    state: EngineState, transaction: Transaction, *, donate: bool = True
) -> tuple[EngineState, tuple[EventRecord, ...]]:
    """Makes a transaction part of the state.

    Args:
        state: The state that the transaction was executed from, or one that differs in unrelated requests only.
        transaction: A transaction that was not committed before.
        donate: Take over the state's store, which spends the state; False copies the store and keeps the state usable.

    Returns:
        The next state, and the events that this commit appended to its queue.

    Raises:
        TypeError: An argument is of another type.
        SpentStateError: Another commit has taken the state over.
        EngineError: A failure has ended the engine's work.
        StaleTransactionError: The transaction was committed already, or its requests, tables or pool have changed
            since; the state stays usable.
        StepError: Something failed. With `donate` it is a `StoreLostError` from the device write on; otherwise the
            state is untouched, and the transaction can be committed still.
    """
    require_unspent(state)
    require_healthy(state.control)
    if not isinstance(transaction, Transaction):
        raise TypeError(f"the transaction is a {type(transaction).__name__}; give what execute returned")
    if transaction.fate.committed:
        raise StaleTransactionError("this transaction was committed already; execute the next plan instead")
    if reason := _stale(state, transaction.plan):
        raise StaleTransactionError(f"the transaction is stale: {reason}; plan and execute again")
    with _failures_of(state.store):
        reach(Stage.VALIDATE)
        control = _next_control(state.control, transaction)
        events = control.events[len(state.control.events) :]
    transaction.fate.committed = state.store.lease.spent = donate
    with _failures_of(state.store, taken=donate):
        reach(Stage.PUBLISH)
        store = _publish(state.store, transaction.staged, donate)
    transaction.fate.committed = True
    return EngineState(control, store), events


def step(model: Model, state: EngineState) -> tuple[EngineState, tuple[EventRecord, ...]]:
    """Plans, executes and commits one step; a state with no runnable work is returned as it is.

    Raises:
        StepError: See `execute` and `commit`.
    """
    plan = plan_step(state)
    if plan.outcome in (StepOutcome.NO_WORK, StepOutcome.CAPACITY_DEFERRED):
        return state, ()
    return commit(state, execute(model, state, plan))


def require_executable(state: EngineState, plan: StepPlan) -> StepPlan:
    """Returns the plan with its rows where the state's columns have them now.

    Raises:
        TypeError: `plan` is no StepPlan.
        SpentStateError: A commit has taken the state over.
        ValueError: The plan is not executable, or was made for another state.
    """
    require_unspent(state)
    if not isinstance(plan, StepPlan):
        raise TypeError(f"the plan is a {type(plan).__name__}; give what plan_step returned")
    if plan.outcome not in (StepOutcome.COMMITTED, StepOutcome.UNSERVICEABLE_REQUEST):
        raise ValueError(
            f"a plan of outcome {plan.outcome.name} has nothing to execute; plan again after a change"
        )
    if reason := _stale(state, plan):
        raise ValueError(f"the plan does not fit this state: {reason}; plan and execute from the same state")
    # Unrelated requests may have come or gone, which moves the others' rows.
    plan = dataclasses.replace(plan, index=rows_of(state.control, plan.request_ids))
    if not _counts_fit(state.control, plan):
        raise ValueError("the plan does not fit this state: a row has too many tokens or none; plan again")
    return plan


def _stale(state: EngineState, plan: StepPlan) -> str | None:
    """Says what has changed since the plan was made and that it rests on; the cost does not grow with context."""
    if state.store.lease is not plan.lease:
        return "another step was committed since"
    rows = rows_of(state.control, plan.involved)
    changed = rows < 0
    if not changed.any():
        changed = state.control.requests.stamp[rows] != plan.stamps
    if changed.any():
        return f"request {plan.involved[changed][0]} changed since"
    if not np.array_equal(state.control.free_blocks, plan.free_blocks):
        return "the block pool changed since"
    return None


def _counts_fit(control: Control, plan: StepPlan) -> bool:
    ends = plan.past + plan.num_tokens
    return bool(((plan.num_tokens >= 1) & (ends <= control.requests.length[plan.index])).all())


def _next_control(control: Control, transaction: Transaction) -> Control:
    """The control value after the step; pure, and complete before the device write begins."""
    reach(Stage.BOOKKEEPING)
    plan = transaction.plan
    index = rows_of(control, plan.request_ids)
    newcomers = int(plan.is_new.sum())
    counters = control.counters.copy()
    first_order = counters[ADMISSIONS] + 1
    counters[[DEFERRALS, ADMISSIONS, STEPS]] += plan.deferred, newcomers, int(len(index) > 0)
    requests = control.requests
    order = requests.order[index]
    order[plan.is_new] = first_order + np.arange(newcomers)
    settled = np.where(plan.is_new, -1, requests.settled[index])
    control = control.replace(  # type: ignore[attr-defined]
        blocks=_with_reserved(control, index, plan),
        free_blocks=control.free_blocks[: len(control.free_blocks) - len(plan.reserved)],
        counters=counters,
        suspects=without_suspects(control.suspects, plan.request_ids.tolist()),
    )
    control = replace_rows(
        control,
        index,
        status=RequestStatus.ACTIVE,
        place=plan.places,
        bank=1 - requests.bank[index],
        order=order,
        admitted=np.where(plan.is_new, counters[STEPS], requests.admitted[index]),
        queued=np.where(plan.is_new, requests.served[index], requests.queued[index]),
        settled=np.where(plan.samples & (settled < 0), counters[STEPS], settled),
        served=counters[STEPS],
        processed=plan.past + plan.num_tokens,
        failures=0,
    )
    if len(plan.evicted):
        control = _without_residence(control, rows_of(control, plan.evicted))
    reach(Stage.EVENTS)
    if transaction.staged is not None:
        control = _with_tokens(control, index, plan, transaction.staged.tokens)
    for request_id in plan.unserviceable:
        control = finish_turn(
            control,
            row_of(control, int(request_id)),
            FinishReason.FAILED,
            EngineErrorCode.REQUEST_UNSERVICEABLE,
            f"request {request_id} needs more blocks than the pool of {control.num_blocks} has; "
            "close it and use a larger EngineConfig.num_blocks",
        )
    return control


def _without_residence(control: Control, rows: np.ndarray) -> Control:
    """Takes blocks and places back; a live turn waits again, and what it has so far becomes input to run once more."""
    requests = control.requests
    live = rows[requests.status[rows] != RequestStatus.TURN_COMPLETE]
    counters = control.counters.copy()
    counters[PREEMPTIONS] += len(live)
    control = control.replace(  # type: ignore[attr-defined]
        blocks=control.blocks.clear_rows(rows),
        free_blocks=free_without(control, rows),
        counters=counters,
    )
    control = replace_rows(control, rows, place=-1, order=-1, processed=0)
    return replace_rows(control, live, status=RequestStatus.QUEUED, input_end=requests.length[live])


def _with_reserved(control: Control, index: np.ndarray, plan: StepPlan) -> LogTable:
    table = control.blocks
    ends = np.cumsum(plan.num_reserved)
    one = plan.num_reserved == 1
    table = table.append_each(index[one], plan.reserved[ends[one] - 1])
    for i in np.flatnonzero(plan.num_reserved > 1):
        table = table.extend(int(index[i]), plan.reserved[ends[i] - plan.num_reserved[i] : ends[i]])
    return table


def _with_tokens(control: Control, index: np.ndarray, plan: StepPlan, chosen: np.ndarray) -> Control:
    """Appends each sampling row's token, ends the turns that it ends, and publishes the events in the plan's order."""
    sampling = np.flatnonzero(plan.samples)
    rows, tokens = index[sampling], chosen[sampling]
    is_eos = np.isin(tokens, list(control.facts.eos_token_ids))
    grown = rows[~is_eos]
    requests = control.requests
    length, generated = requests.length.copy(), requests.generated.copy()
    length[grown] += 1
    generated[grown] += 1
    control = control.replace(tokens=control.tokens.append_each(grown, tokens[~is_eos]))  # type: ignore[attr-defined]
    control = replace_rows(
        control,
        rows,
        length=length[rows],
        generated=generated[rows],
        undrained=requests.undrained[rows] + 1,
    )

    limit = requests.max_generated[rows]
    reasons = np.select(
        [is_eos, (limit > 0) & (generated[rows] >= limit), length[rows] >= requests.max_session[rows]],
        [FinishReason.EOS, FinishReason.MAX_GENERATED_TOKENS, FinishReason.MAX_SESSION_TOKENS],
        FinishReason.NONE,
    )
    done = reasons != FinishReason.NONE
    control = replace_rows(control, rows[done], status=RequestStatus.TURN_COMPLETE)
    columns = (requests.id, requests.turn, requests.prompt_tokens, generated)
    events = [
        EventRecord(
            request_id=request_id,
            turn_id=turn,
            flags=_TOKEN_FLAGS[bool(eos), reason != FinishReason.NONE],
            token=-1 if eos else token,
            finish_reason=_REASONS[reason],
            usage=Usage(prompt_tokens, generated_tokens),
        )
        for token, reason, eos, request_id, turn, prompt_tokens, generated_tokens in zip(
            tokens.tolist(),
            reasons.tolist(),
            is_eos,
            *(column[rows].tolist() for column in columns),
            strict=True,
        )
    ]
    return control.replace(events=(*control.events, *events))  # type: ignore[attr-defined]


# Looking enumerations up is much of the time of a step of thousands of rows.
_REASONS = list(FinishReason)
_TOKEN_FLAGS = {
    (False, False): EngineEventFlags.TOKEN,
    (False, True): EngineEventFlags.TOKEN | EngineEventFlags.TURN_FINISHED,
    (True, True): EngineEventFlags.TURN_FINISHED,
}


def _publish(store: Store, staged: StagedStep | None, donate: bool) -> Store:
    """The next store under a lease of its own; without staged tokens it differs in nothing else."""
    arrays = (store.pages, store.block_table, store.fixed)
    if staged is not None:
        program = staged.programs.publish if donate else staged.programs.publish_copy
        arrays = program(*arrays, staged.result.staged, staged.result.fixed, staged.to)
    elif not donate:
        arrays = jax.tree.map(jnp.copy, arrays)
    return Store(*arrays, Lease())
