"""Who runs next: one look at the control value, from the requests that want to run to the rows of a step.

The policy ranks the candidates, and each is taken if its blocks and its place are at hand; one that isn't hides no
later one. Two rules stand above the policy. Whoever could run and would otherwise be passed over for more than
`fairness_bound` steps goes first. And whoever's wait comes to the bound has a claim on the blocks that it needs, if
it has a place at hand and live requests can free them: no newcomer that has waited less is let in on those.

Under `preemption="recompute"` such a request gets its blocks in time: residents give theirs back, the youngest first,
and run their tokens again later. Those ahead of it keep theirs. Ahead of a request are the others that have waited
longer, and those residents that had waited longer before they were let in and had no token since then when its own
wait began; each may use what it has run for `fairness_bound` steps from its first token. So two requests that don't
fit together don't change places at every step, nor without a token.

Hence a request waits at most `fairness_bound` steps, from 2 up, if it fits into the pool beside those ahead of it and
the finished ones, and none of those waits for a place; and if `max_scheduled_tokens` is below `max_batch_size`, as
many steps longer as it takes to serve a full batch once. Beyond that it waits for the stays of those ahead, each of
at most its prefill and `fairness_bound` steps. When nobody can go on, the youngest residents give way to an older
one.

A static batch is closed to newcomers: they wait until all its members are through. Then it is recycled, which takes
their blocks and places away in a step of its own, so that no step writes what the state before it can read.

To serve by deadline only as far as the bound needs is the earliest-deadline-first rule of Liu and Layland,
"Scheduling algorithms for multiprogramming in a hard-real-time environment" (1973), put off as long as it allows. To
fill gaps with whoever fits, at the risk of giving way to one that waited longer, is the backfilling of batch
schedulers.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.carried import Traits
from jaxengine.policies import Candidates
from jaxengine.state import STEPS, Control, RequestStatus


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What a step is to do; every entry is a row of the control columns.

    Attributes:
        selected: int64[n], who runs, in order.
        num_tokens: int64[n], how many tokens each runs, drafts included.
        num_drafts: int64[n], how many of its drafts are among them.
        num_reserved: int64[n], blocks that each needs beyond those that it holds.
        unserviceable: int64[m], who could not run in an empty pool either.
        evicted: int64[k], who gives its blocks and its place back.
        deferred: How many were put off for lack of capacity.
    """

    selected: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    num_reserved: np.ndarray
    unserviceable: np.ndarray
    evicted: np.ndarray
    deferred: int


SCORED_CHUNK = 64
"""Most tokens of a row whose prompt is scored: each has logits of its own, which are as wide as the vocabulary."""

_NONE = np.zeros(0, np.int64)
_NOTHING = Schedule(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, 0)


def schedule(control: Control) -> Schedule:
    """Decides what the next step does; the cost grows with residents and waiting requests, not with their context."""
    requests, config = control.requests, control.config
    live = (requests.status == RequestStatus.QUEUED) | (requests.status == RequestStatus.ACTIVE)
    resident = requests.place >= 0
    if config.batching == "static" and resident.any() and live.any():
        live &= resident
        if not live.any():
            return dataclasses.replace(_NOTHING, evicted=np.flatnonzero(resident))
    rows = np.flatnonzero(live)
    if len(rows) == 0:
        return _NOTHING
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
    selected, reserved = demand.rows[taken], demand.wanted[taken]
    drafts, extra = _drafts(control, selected, _unclaimed(control, demand, taken))
    return Schedule(
        selected=selected,
        num_tokens=drafts + _grow(control, selected, int(drafts.sum())),
        num_drafts=drafts,
        num_reserved=reserved + extra,
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
        claims: bool[n], whether its wait comes to the bound, so that later newcomers have to leave it its blocks.
        claimed: int64[n], free blocks that it has to leave to others.
        is_new: bool[n], whether it needs a place.
        waited: int64[n], steps since it was served.
        seniority: int64[n], indices from the longest waiting to the shortest.
        reachable: bool[n], whether it has a place, or gets a free one by seniority, and the blocks that it needs are
            free or held by live requests.
        fits: bool[n], whether it could run if it were considered first.
    """

    rows: np.ndarray
    wanted: np.ndarray
    claims: np.ndarray
    claimed: np.ndarray
    is_new: np.ndarray
    waited: np.ndarray
    seniority: np.ndarray
    reachable: np.ndarray
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
    returned = policy(candidates)
    try:
        order = np.asarray(returned)
    except ValueError:  # NumPy's, about rows of different lengths
        order = _NONE
    in_form = order.shape == rows.shape and np.issubdtype(order.dtype, np.integer)
    if not in_form or not np.array_equal(np.sort(order), np.arange(len(rows))):
        raise ValueError(
            f"EngineConfig.policy {policy!r} returned {returned!r}; return each index from 0 to {len(rows) - 1} once"
        )
    return order


def _demand(control: Control, rows: np.ndarray) -> _Demand:
    requests, config = control.requests, control.config
    free_blocks, free_places = _room(control)
    held = control.blocks_held[rows]
    needed = blocks_for(requests.length[rows], config.block_size)
    wanted = needed - held
    is_new = requests.place[rows] < 0
    waited = control.counters[STEPS] - requests.served[rows]
    seniority = np.lexsort((requests.submitted[rows], -waited))

    # As many newcomers as there are places, the longest waiting ones; and nobody who needs what finished ones hold.
    place_rank = np.zeros(len(rows), np.int64)
    place_rank[seniority] = np.cumsum(is_new[seniority])
    reachable = (~is_new | (place_rank <= free_places)) & (needed <= free_blocks + int(held.sum()))

    claims = reachable & (waited >= config.fairness_bound - 1)
    claimed = np.zeros(len(rows), np.int64)
    claimed[seniority] = np.cumsum((claims * wanted)[seniority])
    # Residents go on whatever is claimed: who else could never finish.
    claimed = np.where(is_new, claimed - claims * wanted, 0)
    fits = reachable & (wanted + claimed <= free_blocks)
    return _Demand(rows, wanted, claims, claimed, is_new, waited, seniority, reachable, fits)


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
    columns = (demand.wanted, demand.claims, demand.claimed, demand.is_new)
    wanted, claims, claimed, is_new = (column[able].tolist() for column in columns)
    chosen: list[int] = []
    considered = len(sequence)
    unclaimed = free_blocks
    for i in range(len(able)):
        if wanted[i] > free_blocks:
            continue
        if is_new[i] and (free_places == 0 or wanted[i] + claimed[i] > unclaimed):
            continue
        chosen.append(i)
        free_blocks -= wanted[i]
        free_places -= is_new[i]
        # Blocks that go to their claimant are still part of what others had to leave.
        unclaimed -= 0 if claims[i] else wanted[i]
        if len(chosen) == rows_left:
            considered = int(positions[i]) + 1
            break
    return able[chosen], considered - len(chosen)


def _by_deadline(demand: _Demand, rows: int, bound: int) -> np.ndarray:
    """Every index, those first that the bound can't put off: residents get rows first, then the eldest."""
    senior = demand.seniority[demand.reachable[demand.seniority]]
    residents = senior[~demand.is_new[senior]]
    pressing = _distinct(
        np.concatenate([_pressing(demand, group, rows, bound) for group in (residents, senior)])
    )
    # Whoever has a row takes blocks by seniority: they may have been made free for the eldest.
    head = senior[np.isin(senior, pressing[:rows])]
    return _distinct(np.concatenate([head, pressing, np.arange(len(demand.rows))]))


def _pressing(demand: _Demand, group: np.ndarray, rows: int, bound: int) -> np.ndarray:
    """Those of `group`, sorted by seniority, who have to run now so that everyone in it can run in time."""
    fits = demand.fits[group]
    able = group[fits]
    slack = np.maximum(bound - demand.waited[able], 0)
    # Everyone with a slack of at most s has to run within s + 1 steps, of which this is one. Elder ones whose blocks
    # are not at hand count: theirs may come just in time.
    must = np.minimum(np.flatnonzero(fits) + 1 - rows * slack, np.arange(1, len(able) + 1))
    return able[: must.max(initial=0)]


def _distinct(indices: np.ndarray) -> np.ndarray:
    """Each index once, where it comes first."""
    return indices[np.sort(np.unique(indices, return_index=True)[1])]


def _only_suspects(control: Control, demand: _Demand, sequence: np.ndarray) -> np.ndarray:
    """The indices of the first group of suspects that can run; all indices if none can."""
    ids = control.requests.id[demand.rows[sequence]]
    for group in control.suspects:
        member = np.isin(ids, np.array(group, np.uint64)) & demand.fits[sequence]
        if member.any():
            return sequence[member]
    return sequence


def _victims(control: Control, demand: _Demand, taken: np.ndarray) -> np.ndarray:
    """Rows that give their blocks back, so that whoever reaches the bound can run next, or anybody at all."""
    left = np.ones(len(demand.rows), bool)
    left[taken] = False
    late = demand.waited >= control.config.fairness_bound - 1
    room = _room(control)[0] - int(demand.wanted[taken].sum())
    # What comes free with each: its blocks, and those that it would get in this step.
    gain = control.blocks_held[demand.rows] + np.where(left, 0, demand.wanted)
    residents = np.flatnonzero(~demand.is_new)
    order = control.requests.order[demand.rows[residents]]
    victims = residents[np.lexsort((-order, late[residents]))]
    # Whoever is served at the last moment is not put off by this.
    victims = victims[left[victims] | ~late[victims] | (demand.waited[victims] == 0)]
    evicted = _for_the_due(control, demand, left & late & demand.reachable, victims, gain, room)
    if len(evicted) == 0 and len(taken) == 0 and left.any():
        evicted = _for_anybody(demand, residents[np.argsort(-order)], gain, room)
    return demand.rows[evicted]


def _for_the_due(
    control: Control, demand: _Demand, due: np.ndarray, victims: np.ndarray, gain: np.ndarray, room: int
) -> np.ndarray:
    """Indices from the front of `victims` that make room for each of the `due` in turn, the longest waiting first."""
    evicted = np.zeros(len(due), bool)
    spared = np.zeros(len(due), bool)
    newcomers_wait = False
    for who in demand.seniority[due[demand.seniority]].tolist():
        if evicted[who] or (newcomers_wait and demand.is_new[who]):
            continue
        spared[who] = True
        open_to = victims[_gives_way(control, demand.rows[victims], demand.rows[who])]
        open_to = open_to[~(evicted | spared)[open_to]]
        count = _fewest(gain[open_to], int(demand.wanted[who]) - room)
        if count is None:
            newcomers_wait = True
            continue
        evicted[open_to[:count]] = True
        room += int(gain[open_to[:count]].sum() - demand.wanted[who])
    return np.flatnonzero(evicted)


def _gives_way(control: Control, residents: np.ndarray, row: int) -> np.ndarray:
    """bool[residents], whether each was let in past `row`, which waited longer, or has had a stay of its own."""
    requests = control.requests
    queued, since = requests.queued[residents], requests.served[row]
    later = requests.submitted[residents] > requests.submitted[row]
    stayed = control.counters[STEPS] - requests.settled[residents] >= control.config.fairness_bound - 1
    return (queued > since) | ((queued == since) & later) | ((requests.settled[residents] >= 0) & stayed)


def _for_anybody(demand: _Demand, youngest: np.ndarray, gain: np.ndarray, room: int) -> np.ndarray:
    """The fewest of the youngest whose blocks let an older resident go on, or if none could, a newcomer."""
    found = []
    for who in youngest[::-1]:
        others = youngest[youngest != who]
        count = _fewest(gain[others], int(demand.wanted[who]) - room)
        if count is not None:
            found.append(others[:count])
    newcomers = np.flatnonzero(demand.is_new)
    if not found and len(newcomers):
        least = int((demand.wanted + demand.claimed)[newcomers].min())
        count = _fewest(gain[youngest], least - room)
        if count is not None:
            # Its place comes free with the first of them.
            found.append(youngest[: max(count, 1)])
    return min(found, key=len, default=_NONE)


def _fewest(gains: np.ndarray, missing: int) -> int | None:
    """How many of `gains`, from the front, make up for what is missing; None if all don't."""
    count = int(np.searchsorted(np.cumsum(np.append(0, gains)), missing))
    return count if count <= len(gains) else None


def _grow(control: Control, selected: np.ndarray, drafts: int) -> np.ndarray:
    """Tokens of each selected row: one, and for prefills what drafts have left of the budget, in order."""
    requests, config = control.requests, control.config
    counts = np.ones(len(selected), np.int64)
    budget = config.max_scheduled_tokens - len(selected) - drafts
    chunk = config.chunk_size or config.max_scheduled_tokens
    prefill = requests.processed[selected] < requests.input_end[selected]
    for i in np.flatnonzero(prefill):
        remaining = int(requests.length[selected[i]] - requests.processed[selected[i]])
        scored = requests.traits[selected[i]] & Traits.SCORED
        extra = min(budget, min(remaining, chunk, SCORED_CHUNK if scored else chunk) - 1)
        counts[i] += extra
        budget -= extra
    return counts


def _unclaimed(control: Control, demand: _Demand, taken: np.ndarray) -> int:
    """Free blocks that no row of the step needs and no one who is passed over has a claim on."""
    claimed = demand.claims * demand.wanted
    claimed[taken] = demand.wanted[taken]
    return max(len(control.free_blocks) - int(claimed.sum()), 0)


def _drafts(control: Control, selected: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """How many drafts of each selected row run, and the blocks that they need beyond the row's.

    They are optional work: in order, with what a token for every row leaves of the budget, and with `blocks` that
    nobody else is to have.
    """
    requests, config = control.requests, control.config
    drafts, extra = np.zeros((2, len(selected)), np.int64)
    budget = config.max_scheduled_tokens - len(selected)
    proposed = requests.num_drafts[selected] * (requests.processed[selected] >= requests.input_end[selected])
    for i in np.flatnonzero(proposed):
        row = selected[i]
        most = min(int(proposed[i]), budget, (config.chunk_size or config.max_scheduled_tokens) - 1)
        held = max(int(control.blocks_held[row]), int(blocks_for(requests.length[row], config.block_size)))
        most = min(most, (held + blocks) * config.block_size - int(requests.length[row]))
        needed = max(int(blocks_for(requests.length[row] + most, config.block_size)) - held, 0)
        drafts[i], extra[i] = most, needed
        budget, blocks = budget - most, blocks - needed
    return drafts, extra
