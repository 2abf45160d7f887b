"""Which rows the next step runs: a pure look at the control value that changes nothing.

Decodes come first in order of residence, then prefills of residents, then waiting requests in order of submission. Each
gets one token where its blocks fit; what is left of the token budget then goes to the prefills in the same order.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.state import Control, EngineState, Lease, RequestStatus, require_unspent


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
        num_tokens: How many of them, from its first uncommitted one.
        is_prefill: Whether they are input.
        is_new: Whether the request gets its place in this step.
        samples: Whether its last token's logits choose the next token.
        packed_token_offset: Where its tokens start in the packed step.
        logits_row_index: Where its last token is in the packed step.
        block_ids: Blocks reserved for it.
    """

    request_id: int
    num_tokens: int
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
        num_tokens: int64[rows], tokens of each row.
        is_prefill, is_new, samples: bool[rows].
        places: int32[rows], each row's place in the block table.
        offsets: int64[rows], where each row starts in the packed step.
        reserved: int32[new blocks], taken from the pool, row after row.
        num_reserved: int64[rows], how many of them each row gets.
        unserviceable: uint64[n], requests that could not run in an empty pool.
        deferred: How many candidates were put off for lack of capacity.
        lease: Of the store that the state held; another commit changes it.
        stamps: uint64[rows + n], the stamps of the rows' and the unserviceable requests.
        free_blocks: int32[free], the whole pool.
    """

    outcome: StepOutcome
    index: np.ndarray
    request_ids: np.ndarray
    past: np.ndarray
    num_tokens: np.ndarray
    is_prefill: np.ndarray
    is_new: np.ndarray
    samples: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    reserved: np.ndarray
    num_reserved: np.ndarray
    unserviceable: np.ndarray
    deferred: int
    lease: Lease
    stamps: np.ndarray
    free_blocks: np.ndarray

    @property
    def involved(self) -> np.ndarray:
        """uint64[rows + n], the requests that the plan runs or ends."""
        return np.concatenate([self.request_ids, self.unserviceable])

    @property
    def total_tokens(self) -> int:
        """Tokens of the packed step."""
        return int(self.num_tokens.sum())

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The same rows one by one, for people and tests."""
        ends = np.cumsum(self.num_reserved)
        return tuple(
            PlanRow(
                request_id=int(self.request_ids[i]),
                num_tokens=int(self.num_tokens[i]),
                is_prefill=bool(self.is_prefill[i]),
                is_new=bool(self.is_new[i]),
                samples=bool(self.samples[i]),
                packed_token_offset=int(self.offsets[i]),
                logits_row_index=int(self.offsets[i] + self.num_tokens[i] - 1),
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
    """
    require_unspent(state)
    control = state.control
    requests, config = control.requests, control.config
    candidates = _candidates(control)
    if len(candidates) == 0:
        return _plan(state, StepOutcome.NO_WORK, candidates, candidates, candidates, candidates, 0)

    # A decode needs its next slot; a prefill is admitted with the blocks of its whole input.
    held = control.blocks_held[candidates]
    needed = blocks_for(requests.length[candidates], config.block_size)
    hopeless = needed > min(config.num_blocks, control.table_width)
    selected, deferred = _select(control, candidates[~hopeless], (needed - held)[~hopeless])
    unserviceable = candidates[hopeless]
    if len(selected) == 0:
        outcome = StepOutcome.UNSERVICEABLE_REQUEST if len(unserviceable) else StepOutcome.CAPACITY_DEFERRED
        return _plan(state, outcome, selected, selected, selected, unserviceable, deferred)
    grown = _grow(control, selected)
    wanted = blocks_for(requests.length[selected], config.block_size) - control.blocks_held[selected]
    return _plan(state, StepOutcome.COMMITTED, selected, grown, wanted, unserviceable, deferred)


def _candidates(control: Control) -> np.ndarray:
    """Rows that want to run: decodes by residence, then prefills by residence, then waiting ones by submission."""
    requests = control.requests
    live = (requests.status == RequestStatus.QUEUED) | (requests.status == RequestStatus.ACTIVE)
    rows = np.flatnonzero(live)
    resident = requests.place[rows] >= 0
    prefill = requests.processed[rows] < requests.input_end[rows]
    rank = np.where(resident, requests.order[rows], requests.submitted[rows])
    return rows[np.lexsort((rank, ~resident, prefill))]


def _select(control: Control, candidates: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, int]:
    """Takes each candidate whose blocks and place fit, in order; one that does not fit hides no later one."""
    config = control.config
    free_blocks = len(control.free_blocks)
    free_places = config.max_batch_size - int((control.requests.place >= 0).sum())
    rows_left = min(config.max_batch_size, config.max_scheduled_tokens)
    selected, deferred = [], 0
    for row, blocks, place in zip(
        candidates.tolist(), wanted.tolist(), control.requests.place[candidates].tolist(), strict=True
    ):
        if rows_left == 0:
            break
        if blocks > free_blocks or (place < 0 and free_places == 0):
            deferred += 1
            continue
        selected.append(row)
        free_blocks -= blocks
        free_places -= place < 0
        rows_left -= 1
    return np.array(selected, np.int64), deferred


def _grow(control: Control, selected: np.ndarray) -> np.ndarray:
    """Tokens of each selected row: one, and for prefills what is left of the budget in order."""
    requests, config = control.requests, control.config
    counts = np.ones(len(selected), np.int64)
    budget = config.max_scheduled_tokens - len(selected)
    chunk = config.chunk_size or config.max_scheduled_tokens
    prefill = requests.processed[selected] < requests.input_end[selected]
    for i in np.flatnonzero(prefill):
        remaining = int(requests.length[selected[i]] - requests.processed[selected[i]])
        extra = min(budget, min(remaining, chunk) - 1)
        counts[i] += extra
        budget -= extra
    return counts


def _plan(
    state: EngineState,
    outcome: StepOutcome,
    selected: np.ndarray,
    counts: np.ndarray,
    wanted: np.ndarray,
    unserviceable: np.ndarray,
    deferred: int,
) -> StepPlan:
    control = state.control
    requests = control.requests
    past = requests.processed[selected]
    is_new = requests.place[selected] < 0
    places = requests.place[selected].copy()
    if is_new.any():
        taken = np.zeros(control.config.max_batch_size, bool)
        taken[requests.place[requests.place >= 0]] = True
        places[is_new] = np.flatnonzero(~taken)[: int(is_new.sum())]
    total = int(wanted.sum())
    return StepPlan(
        outcome=outcome,
        index=selected,
        request_ids=requests.id[selected],
        past=past,
        num_tokens=counts,
        is_prefill=past < requests.input_end[selected],
        is_new=is_new,
        samples=past + counts == requests.length[selected],
        places=places,
        offsets=np.cumsum(counts) - counts,
        reserved=control.free_blocks[::-1][:total],
        num_reserved=wanted,
        unserviceable=requests.id[unserviceable],
        deferred=deferred,
        lease=state.store.lease,
        stamps=requests.stamp[np.concatenate([selected, unserviceable])],
        free_blocks=control.free_blocks,
    )
