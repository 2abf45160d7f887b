"""Who runs next: one look at the control value, from the requests that want to run to the rows of a step.

The policy ranks the candidates, and each is taken if its blocks and its place are at hand; one that isn't hides no
later one. Three rules stand above the policy. Whoever could run and would otherwise be passed over for more than
`fairness_bound` steps goes first. Whoever has waited up to the bound for blocks has the first claim on those that come
free, before anybody's input but not before the next slot of those that decode, who else could never finish. And under
`preemption="recompute"` such a one, or everybody when nobody can go on, is helped by the youngest resident, which
gives its blocks back and runs its tokens again later.

A static batch is closed to newcomers: they wait until all its members are through. Then it is recycled, which takes
their blocks and places away in a step of its own, so that no step writes what the state before it can read.

To serve by deadline only as far as the bound needs is the earliest-deadline-first rule of Liu and Layland, "Scheduling
algorithms for multiprogramming in a hard-real-time environment" (1973), put off as long as it allows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.policies import Candidates
from jaxengine.state import STEPS, Control, RequestStatus


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What a step is to do; every entry is a row of the control columns.

    Attributes:
        selected: int64[n], who runs, in order.
        num_tokens: int64[n], how many tokens each runs.
        num_reserved: int64[n], blocks that each needs beyond those that it holds.
        unserviceable: int64[m], who could not run in an empty pool either.
        evicted: int64[k], who gives its blocks and its place back.
        deferred: How many were put off for lack of capacity.
    """

    selected: np.ndarray
    num_tokens: np.ndarray
    num_reserved: np.ndarray
    unserviceable: np.ndarray
    evicted: np.ndarray
    deferred: int


_NONE = np.zeros(0, np.int64)


def schedule(control: Control) -> Schedule:
    """Decides what the next step does; the cost grows with residents and waiting requests, not with their context."""
    requests, config = control.requests, control.config
    live = (requests.status == RequestStatus.QUEUED) | (requests.status == RequestStatus.ACTIVE)
    resident = requests.place >= 0
    if config.batching == "static" and resident.any() and live.any():
        live &= resident
        if not live.any():
            return Schedule(_NONE, _NONE, _NONE, _NONE, np.flatnonzero(resident), 0)
    rows = np.flatnonzero(live)
    if len(rows) == 0:
        return Schedule(_NONE, _NONE, _NONE, _NONE, _NONE, 0)
    rows = rows[_ranked(control, rows)]
    needed = blocks_for(requests.length[rows], config.block_size)
    hopeless = needed > min(control.num_blocks, control.table_width)
    unserviceable, rows = rows[hopeless], rows[~hopeless]
    demand = _demand(control, rows)

    taken, deferred = _select(control, demand)
    evicted = _NONE
    if config.preemption == "recompute":
        evicted = _victims(control, demand, taken)
        taken = taken[~np.isin(demand.rows[taken], evicted)]
    selected = demand.rows[taken]
    return Schedule(
        selected=selected,
        num_tokens=_grow(control, selected),
        num_reserved=demand.wanted[taken],
        unserviceable=unserviceable,
        evicted=evicted,
        deferred=deferred,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Demand:
    """The candidates in the policy's order, and what each needs.

    Attributes:
        rows: int64[n], rows of the control columns.
        wanted: int64[n], blocks beyond those that it holds.
        claimed: int64[n], free blocks that it has to leave to others.
        is_new: bool[n], whether it needs a place.
        is_prefill: bool[n].
        waited: int64[n], steps since it was served.
        seniority: int64[n], indices from the longest waiting to the shortest.
        fits: bool[n], whether it could run if it were considered first.
    """

    rows: np.ndarray
    wanted: np.ndarray
    claimed: np.ndarray
    is_new: np.ndarray
    is_prefill: np.ndarray
    waited: np.ndarray
    seniority: np.ndarray
    fits: np.ndarray


def _ranked(control: Control, rows: np.ndarray) -> np.ndarray:
    requests, policy = control.requests, control.config.policy
    resident = requests.place[rows] >= 0
    candidates = Candidates(
        request_ids=requests.id[rows],
        is_resident=resident,
        is_prefill=requests.processed[rows] < requests.input_end[rows],
        rank=np.where(resident, requests.order[rows], requests.submitted[rows]),
        num_unprocessed=requests.length[rows] - requests.processed[rows],
        waited=control.counters[STEPS] - requests.served[rows],
    )
    order = np.asarray(policy(candidates))
    if order.shape != rows.shape or not np.array_equal(np.sort(order), np.arange(len(rows))):
        raise ValueError(
            f"EngineConfig.policy {policy!r} returned {order!r}; return each index from 0 to {len(rows) - 1} once"
        )
    return order


def _demand(control: Control, rows: np.ndarray) -> _Demand:
    requests, config = control.requests, control.config
    free_blocks, free_places = _room(control)
    wanted = blocks_for(requests.length[rows], config.block_size) - control.blocks_held[rows]
    is_new = requests.place[rows] < 0
    is_prefill = requests.processed[rows] < requests.input_end[rows]
    waited = control.counters[STEPS] - requests.served[rows]
    seniority = np.lexsort((requests.submitted[rows], -waited))

    claims = np.where(is_prefill & (wanted > free_blocks) & (waited >= config.fairness_bound - 1), wanted, 0)
    claimed = np.zeros(len(rows), np.int64)
    claimed[seniority] = np.cumsum(claims[seniority]) - claims[seniority]
    claimed[~is_prefill | (wanted == 0)] = 0

    # As many newcomers as there are places, the longest waiting ones.
    place_rank = np.zeros(len(rows), np.int64)
    place_rank[seniority] = np.cumsum(is_new[seniority])
    fits = (wanted + claimed <= free_blocks) & (~is_new | (place_rank <= free_places))
    return _Demand(rows, wanted, claimed, is_new, is_prefill, waited, seniority, fits)


def _room(control: Control) -> tuple[int, int]:
    residents = int((control.requests.place >= 0).sum())
    return len(control.free_blocks), control.config.max_batch_size - residents


def _select(control: Control, demand: _Demand) -> tuple[np.ndarray, int]:
    """Indices of the candidates that run, and how many were put off for lack of blocks or places."""
    config = control.config
    free_blocks, free_places = _room(control)
    rows_left = min(config.max_batch_size, config.max_scheduled_tokens)
    sequence = _by_deadline(demand, rows_left, config.fairness_bound)
    if control.suspects:
        sequence = _only_suspects(control, demand, sequence)
    possible = (demand.wanted + demand.claimed <= free_blocks) & (~demand.is_new | (free_places > 0))
    positions = np.flatnonzero(possible[sequence])
    able = sequence[positions]
    wanted, claimed, is_new = (c[able].tolist() for c in (demand.wanted, demand.claimed, demand.is_new))
    chosen: list[int] = []
    considered = len(sequence)
    for i in range(len(able)):
        if wanted[i] + claimed[i] > free_blocks or (is_new[i] and free_places == 0):
            continue
        chosen.append(i)
        free_blocks -= wanted[i]
        free_places -= is_new[i]
        if len(chosen) == rows_left:
            considered = int(positions[i]) + 1
            break
    return able[chosen], considered - len(chosen)


def _by_deadline(demand: _Demand, rows: int, bound: int) -> np.ndarray:
    """Every index, those first that the bound can't put off, the longest waiting in front."""
    able = demand.seniority[demand.fits[demand.seniority]]
    slack = np.maximum(bound - demand.waited[able], 0)
    # Everyone with a slack of at most s has to run within s + 1 steps, of which this is one.
    must = (np.arange(1, len(able) + 1) - rows * slack).max(initial=0)
    first = able[:must]
    rest = np.ones(len(demand.rows), bool)
    rest[first] = False
    return np.concatenate([first, np.flatnonzero(rest)])


def _only_suspects(control: Control, demand: _Demand, sequence: np.ndarray) -> np.ndarray:
    """The indices of the first group of suspects that can run; all indices if none can."""
    ids = control.requests.id[demand.rows[sequence]]
    for group in control.suspects:
        member = np.isin(ids, np.array(group, np.uint64)) & demand.fits[sequence]
        if member.any():
            return sequence[member]
    return sequence


def _victims(control: Control, demand: _Demand, taken: np.ndarray) -> np.ndarray:
    """Rows that give their blocks back, so that somebody who waits for blocks can run in the next step."""
    requests = control.requests
    free_blocks, free_places = _room(control)
    free_blocks -= int(demand.wanted[taken].sum())
    free_places -= int(demand.is_new[taken].sum())
    left = np.ones(len(demand.rows), bool)
    left[taken] = False
    resident = demand.rows[~demand.is_new]
    youngest = resident[np.argsort(-requests.order[resident])]

    bound = control.config.fairness_bound
    overdue = left & (demand.wanted > _room(control)[0]) & (demand.waited >= bound - 1)
    if overdue.any():
        who = demand.seniority[overdue[demand.seniority]][:1]
        # One that came in lately, or is still in its prefill, keeps its blocks: else two could take turns for ever.
        settled = (
            (control.counters[STEPS] - requests.admitted[youngest] >= bound)
            & (requests.processed[youngest] >= requests.input_end[youngest])
            & (youngest != demand.rows[who])
        )
        found = _enough(control, demand, who, youngest[settled], free_blocks, free_places)
        if len(found):
            return found
    if len(taken) == 0 and left.any():
        return _enough(control, demand, np.flatnonzero(left), youngest, free_blocks, free_places)
    return _NONE


def _enough(
    control: Control,
    demand: _Demand,
    who: np.ndarray,
    victims: np.ndarray,
    free_blocks: int,
    free_places: int,
) -> np.ndarray:
    """The fewest of `victims`, from the front, that let one of the candidates `who` run; none if none could."""
    for count in range(1, len(victims) + 1):
        chosen = victims[:count]
        blocks = free_blocks + int(control.blocks_held[chosen].sum())
        helped = (demand.wanted[who] <= blocks) & (~demand.is_new[who] | (free_places + count > 0))
        if (helped & ~np.isin(demand.rows[who], chosen)).any():
            return chosen
    return _NONE


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
