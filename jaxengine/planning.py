"""A plan: what the next step runs, laid out in the order in which it is packed and reported.

Planning is a pure look at the control value that changes nothing; who runs is decided in `scheduling`.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from jaxengine.carried import Traits, next_scored
from jaxengine.faults import Stage, reach
from jaxengine.scheduling import Schedule, schedule
from jaxengine.state import Control, EngineState, Lease, require_healthy, require_unspent


class StepOutcome(enum.Enum):
    """What planning, or the step made from a plan, came to."""

    NO_WORK = "no work"
    CAPACITY_DEFERRED = "capacity deferred"
    UNSERVICEABLE_REQUEST = "unserviceable request"
    COMMITTED = "committed"
    RETRYABLE_BATCH_ABORT = "retryable batch abort"
    EXECUTION_CAPACITY_EXCEEDED = "execution capacity exceeded"
    EXECUTION_CONTRACT_FAILURE = "execution contract failure"
    FATAL_EXECUTION_FAILURE = "fatal execution failure"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One request's share of a step.

    Attributes:
        request_id: Whose tokens run.
        num_tokens: How many of them, from its first uncommitted one; drafts behind its sequence included.
        num_drafts: How many of them are drafts.
        is_prefill: Whether they are input.
        is_new: Whether the request gets its place in this step.
        samples: Whether its last token's logits choose the next token.
        packed_token_offset: Where its tokens start in the packed step.
        logits_row_index: Where its last token that is no draft is in the packed step.
        block_ids: Blocks reserved for it.
    """

    request_id: int
    num_tokens: int
    num_drafts: int
    is_prefill: bool
    is_new: bool
    samples: bool
    packed_token_offset: int
    logits_row_index: int
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """The rows of a step as columns, in the order in which they are packed and reported.

    Attributes:
        outcome: COMMITTED and UNSERVICEABLE_REQUEST can be executed; NO_WORK and CAPACITY_DEFERRED hold no rows.
        index: int[rows], row of each request in the control columns.
        request_ids: uint64[rows].
        past: int64[rows], committed slots before the step.
        num_tokens: int64[rows], tokens of each row, drafts included.
        num_drafts: int64[rows], how many of them are drafts.
        num_logits: int64[rows], behind how many of its last tokens each row has logits: one, its drafts, and tokens of
            a prompt that is scored.
        is_prefill, is_new, samples: bool[rows].
        places: int32[rows], each row's place in the block table.
        offsets: int64[rows], where each row starts in the packed step.
        reserved: int32[new blocks], taken from the pool, row after row.
        num_reserved: int64[rows], how many of them each row gets.
        unserviceable: uint64[n], requests that could not run in an empty pool.
        evicted: uint64[k], requests that give their blocks and their place back; free from the next step on.
        deferred: How many candidates were put off for lack of capacity.
        lease: Of the store that the state held; another commit changes it.
        stamps: uint64[rows + n + k], the stamps of the rows', the unserviceable and the evicted requests.
        free_blocks: int32[free], the whole pool.
    """

    outcome: StepOutcome
    index: np.ndarray
    request_ids: np.ndarray
    past: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    num_logits: np.ndarray
    is_prefill: np.ndarray
    is_new: np.ndarray
    samples: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    reserved: np.ndarray
    num_reserved: np.ndarray
    unserviceable: np.ndarray
    evicted: np.ndarray
    deferred: int
    lease: Lease
    stamps: np.ndarray
    free_blocks: np.ndarray

    @property
    def involved(self) -> np.ndarray:
        """uint64[rows + n + k], the requests that the plan runs, ends or evicts."""
        return np.concatenate([self.request_ids, self.unserviceable, self.evicted])

    @property
    def total_tokens(self) -> int:
        """Tokens of the packed step."""
        return int(self.num_tokens.sum())

    @property
    def first_choice(self) -> np.ndarray:
        """int64[rows], among all rows of logits, the one behind each row's last token that is no draft."""
        return np.cumsum(self.num_logits) - 1 - self.num_drafts

    @property
    def logits_index(self) -> np.ndarray:
        """int64[rows of logits], the packed token behind which each is, row after row."""
        first = self.offsets + self.num_tokens - self.num_logits
        within = np.arange(self.num_logits.sum()) - np.repeat(
            np.cumsum(self.num_logits) - self.num_logits, self.num_logits
        )
        return np.repeat(first, self.num_logits) + within

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The same rows one by one, for people and tests."""
        ends = np.cumsum(self.num_reserved)
        return tuple(
            PlanRow(
                request_id=int(self.request_ids[i]),
                num_tokens=int(self.num_tokens[i]),
                num_drafts=int(self.num_drafts[i]),
                is_prefill=bool(self.is_prefill[i]),
                is_new=bool(self.is_new[i]),
                samples=bool(self.samples[i]),
                packed_token_offset=int(self.offsets[i]),
                logits_row_index=int(self.offsets[i] + self.num_tokens[i] - self.num_drafts[i] - 1),
                block_ids=tuple(int(b) for b in self.reserved[ends[i] - self.num_reserved[i] : ends[i]]),
            )
            for i in range(len(self.request_ids))
        )


def plan_step(state: EngineState) -> StepPlan:
    """Plans one step. The same state gives the same plan.

    Args:
        state: The committed state; it is only read.

    Returns:
        The plan. Its cost grows with residents and waiting requests, not with context length.

    Raises:
        SpentStateError: A commit has taken the state over.
        EngineError: A failure has ended the engine's work.
        ValueError: The policy returned something else than an order of the candidates.
    """
    require_unspent(state)
    control = state.control
    require_healthy(control)
    reach(Stage.PLAN)
    decided = schedule(control)
    if len(decided.selected) or len(decided.evicted):
        outcome = StepOutcome.COMMITTED
    elif len(decided.unserviceable):
        outcome = StepOutcome.UNSERVICEABLE_REQUEST
    else:
        outcome = StepOutcome.CAPACITY_DEFERRED if decided.deferred else StepOutcome.NO_WORK
    return _plan(state, outcome, decided)


def _plan(state: EngineState, outcome: StepOutcome, decided: Schedule) -> StepPlan:
    control = state.control
    requests = control.requests
    selected, counts = decided.selected, decided.num_tokens
    past = requests.processed[selected]
    is_new = requests.place[selected] < 0
    places = requests.place[selected].copy()
    if is_new.any():
        taken = np.zeros(control.config.max_batch_size, bool)
        taken[requests.place[requests.place >= 0]] = True
        places[is_new] = np.flatnonzero(~taken)[: int(is_new.sum())]
    total = int(decided.num_reserved.sum())
    return StepPlan(
        outcome=outcome,
        index=selected,
        request_ids=requests.id[selected],
        past=past,
        num_tokens=counts,
        num_drafts=decided.num_drafts,
        num_logits=np.maximum(counts - _unscored(control, selected), 1 + decided.num_drafts),
        is_prefill=past < requests.input_end[selected],
        is_new=is_new,
        samples=past + counts - decided.num_drafts == requests.length[selected],
        places=places,
        offsets=np.cumsum(counts) - counts,
        reserved=control.free_blocks[::-1][:total],
        num_reserved=decided.num_reserved,
        unserviceable=requests.id[decided.unserviceable],
        evicted=requests.id[decided.evicted],
        deferred=decided.deferred,
        lease=state.store.lease,
        stamps=requests.stamp[np.concatenate([selected, decided.unserviceable, decided.evicted])],
        free_blocks=control.free_blocks,
    )


def _unscored(control: Control, selected: np.ndarray) -> np.ndarray:
    """int64[rows], how many of a row's next tokens come before those whose logits score a prompt; else very many."""
    requests = control.requests
    before = np.full(len(selected), np.iinfo(np.int64).max // 2)
    for i in np.flatnonzero(requests.traits[selected] & Traits.SCORED):
        row = selected[i]
        next_token = next_scored(requests.carried[row])
        if next_token < requests.carried[row].turn.stop:
            # The logits behind the token before it score it.
            before[i] = max(next_token - 1 - int(requests.processed[row]), 0)
    return before
