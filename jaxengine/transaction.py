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

from jaxengine.bookkeeping import next_control
from jaxengine.carried import Traits
from jaxengine.choosing import edits_of, sampling_rows, with_grammars
from jaxengine.errors import (
    ContractError,
    ExecutionCapacityError,
    ExecutionError,
    RetryableStepError,
    StaleTransactionError,
    StepError,
    StoreLostError,
)
from jaxengine.events import EventRecord
from jaxengine.faults import Stage, reach
from jaxengine.model import Model, require_model
from jaxengine.planning import StepOutcome, StepPlan, plan_step
from jaxengine.programs import (
    Bucket,
    Destinations,
    ForwardResult,
    Programs,
    StepBatch,
    bucket_for,
    destinations,
    pack,
    padded,
)
from jaxengine.reporting import reports_of, with_reports
from jaxengine.sampling_params import MOST_LOGPROBS
from jaxengine.settling import Settled, settle
from jaxengine.sizing import ran_out_of_memory
from jaxengine.state import (
    Control,
    EngineState,
    Lease,
    Store,
    require_healthy,
    require_unspent,
    rows_of,
)
from jaxengine.windows import require_room_in_rings
from pallas_kernels import Backend


@dataclasses.dataclass(eq=False)
class Fate:
    """Whether a transaction was committed; the one thing about it that changes."""

    committed: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StagedStep:
    """What the device made of a plan.

    Attributes:
        result: Staged keys and values, fixed states, and logits float32[rows, vocab], padded to the bucket.
        to: Where the accepted tokens go.
        settled: What was chosen, and what it comes to.
        programs: The programs that publish it.
    """

    result: ForwardResult
    to: Destinations
    settled: Settled
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
        """float32[rows of logits, vocab] in the plan's order, each row's at its last token, behind it at its drafts."""
        if self.staged is None:
            raise ValueError("this transaction has no rows, so it has no logits")
        return self.staged.result.logits[: int(self.plan.num_logits.sum())]


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
    bucket = bucket_for(plan, control.config, control.kernels.prefill_tile)
    batch = pack(control, plan, bucket)
    reach(Stage.EXECUTE)
    drafted = bool(plan.num_drafts.any())
    result = model.programs.forward(
        model.decoder.params,
        store.pages,
        store.block_table,
        store.fixed,
        batch,
        tile_size=bucket.tile_size,
        kernels=control.kernels,
        replayable=drafted and bool(store.fixed),
    )
    # The device is at work: whatever needs no result of it comes first.
    with _failures_of(store, unknown=ContractError):
        reach(Stage.RESERVE)
        _require_reservation(control, plan)
        require_room_in_rings(model.decoder.layers, store.pages, int(plan.num_tokens.max()))
        to = destinations(control, plan, bucket)
    settled = _settled(model, control, plan, bucket, result.logits)
    if drafted:
        result, to = _accepted(model, plan, batch, result, to, settled)
    return StagedStep(result, to, settled, model.programs)


def _settled(model: Model, control: Control, plan: StepPlan, bucket: Bucket, logits: jax.Array) -> Settled:
    """Chooses from the logits, and settles what the choices come to."""
    reach(Stage.MASKS)
    guided = bool((control.requests.traits[plan.index] & Traits.GUIDED).any())
    reports = reports_of(control, plan, bucket)
    choice = model.programs.choose(
        logits,
        sampling_rows(control, plan, bucket),
        edits_of(control, plan, bucket, model.guides if guided else None),
        known_ids=control.facts.num_ids,
        top=None if reports is None else min(MOST_LOGPROBS, control.facts.vocab_size),
        processed=None if reports is None else reports.processed,
        targets=None if reports is None else reports.targets,
    )
    reach(Stage.LOGITS)
    row = np.repeat(np.arange(len(plan.index)), plan.num_logits)
    # Logits that no token is chosen from may be anything: where a prompt is cut must not matter.
    usable = np.asarray(choice.usable)[: len(row)] | ~plan.samples[row]
    # Nor do logits behind a draft matter before the draft is part of the sequence.
    settled = settle(control, plan, np.asarray(choice.tokens)[: len(row)], usable, model.tokenizer)
    _require_choices(control, plan, settled, usable, logits)
    reach(Stage.SAMPLE)
    if reports is not None and choice.logprobs is not None:
        settled = with_reports(control, plan, settled, reports, choice.logprobs)
    return with_grammars(control, plan, settled, model.guides) if guided else settled


def _require_choices(
    control: Control, plan: StepPlan, settled: Settled, usable: np.ndarray, logits: jax.Array
) -> None:
    """Raises `RetryableStepError` if a choice that counts could not be made."""
    bad = np.flatnonzero(~usable[settled.place])
    if len(bad) == 0:
        return
    culprits = tuple(int(i) for i in plan.request_ids[np.unique(settled.row[bad])])
    names = ", ".join(map(str, culprits))
    own = np.asarray(logits)[settled.place[bad]]
    masked = np.isfinite(own[:, : control.facts.num_ids].max(axis=-1)) & ~np.isnan(own).any(axis=-1)
    reason = (
        f"the settings of request {names} leave no token to choose"
        if masked.all()
        else f"the logits of request {names} are not finite"
    )
    raise RetryableStepError(f"{reason}; the step was dropped", culprits)


_OUTSIDE = np.iinfo(np.int32).max
"""As a place or a block: none, so that the write is dropped."""


def _accepted(
    model: Model,
    plan: StepPlan,
    batch: StepBatch,
    result: ForwardResult,
    to: Destinations,
    settled: Settled,
) -> tuple[ForwardResult, Destinations]:
    """Leaves the drafts that were not accepted out of what is to be published."""
    local = np.arange(plan.total_tokens) - np.repeat(plan.offsets, plan.num_tokens)
    refused = np.flatnonzero(local >= np.repeat(settled.slots, plan.num_tokens))
    place, block = to.place.copy(), to.block.copy()
    # Where padding goes.
    place[refused] = block[refused] = _OUTSIDE
    accepted = padded(settled.slots.astype(np.int32), len(to.states))
    fixed = model.programs.after_prefixes(result.fixed, batch.states, accepted)
    return result._replace(fixed=fixed), to._replace(place=place, block=block)


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
        staged = transaction.staged
        control = next_control(state.control, transaction.plan, None if staged is None else staged.settled)
        events = control.events[len(state.control.events) :]
    transaction.fate.committed = state.store.lease.spent = donate
    with _failures_of(state.store, taken=donate):
        reach(Stage.PUBLISH)
        store = _publish(state.store, transaction.staged, donate, state.control.kernels.publication)
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
    requests, own = control.requests, plan.num_tokens - plan.num_drafts
    fits = (own >= 1) & (plan.past + own <= requests.length[plan.index])
    proposed = np.where(plan.samples, requests.num_drafts[plan.index], 0)
    return bool((fits & (plan.num_drafts >= 0) & (plan.num_drafts <= proposed)).all())


def _publish(store: Store, staged: StagedStep | None, donate: bool, backend: Backend) -> Store:
    """The next store under a lease of its own; without staged tokens it differs in nothing else."""
    arrays = (store.pages, store.block_table, store.fixed)
    if staged is not None:
        program = staged.programs.publish if donate else staged.programs.publish_copy
        arrays = program(*arrays, staged.result.staged, staged.result.fixed, staged.to, backend=backend)
    elif not donate:
        arrays = jax.tree.map(jnp.copy, arrays)
    return Store(*arrays, Lease())
