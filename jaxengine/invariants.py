"""Checks of a control value, in time linear in its requests and blocks; each violation is named."""

from __future__ import annotations

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.state import EngineState, RequestStatus, require_unspent


class InvariantViolation(AssertionError):
    """The state contradicts itself; the message names every violation."""


def check_invariants(state: EngineState) -> None:
    """Checks block accounting, ownership, places and progress.

    Raises:
        InvariantViolation: Something does not hold.
        SpentStateError: A commit has taken the state over.
    """
    require_unspent(state)
    control = state.control
    requests, config = control.requests, control.config
    found: list[str] = []

    def require(good: np.ndarray, message: str) -> None:
        found.extend(f"request {request_id}: {message}" for request_id in requests.id[~good])

    held = control.blocks_held
    tables = [control.blocks.read(row, 0, int(held[row])) for row in range(len(requests))]
    every = np.concatenate([control.free_blocks, *tables])
    outside = every[(every < 0) | (every >= control.num_blocks)]
    found.extend(f"block {block} is outside the pool" for block in outside)
    owners = np.bincount(every[(every >= 0) & (every < control.num_blocks)], minlength=control.num_blocks)
    resident = requests.place >= 0
    static = config.batching == "static"
    # Members of a static batch that were closed have left their blocks to it until it is over.
    fewest = 0 if static and resident.any() else 1
    wrong = (owners < fewest) | (owners > 1)
    found.extend(f"block {block} has {owners[block]} owners" for block in np.flatnonzero(wrong))

    places, counts = np.unique(requests.place[resident], return_counts=True)
    found.extend(
        f"place {place} has {count} residents"
        for place, count in zip(places, counts, strict=True)
        if count > 1
    )
    require(requests.place < config.max_batch_size, "its place is outside the block table")
    require(resident == (requests.order >= 0), "it has a place without an admission rank, or the reverse")
    require(resident | (held == 0), "it holds blocks without being resident")
    require(
        ~resident | (held >= blocks_for(requests.processed, config.block_size)),
        "its table is shorter than its committed slots",
    )
    if static:
        joined = resident & (requests.admitted != requests.admitted[resident].max(initial=-1))
        require(~joined, "it joined a static batch that was running")
    require(resident | (requests.processed == 0), "it has committed slots without being resident")
    require(held <= control.table_width, "its table is wider than the block table")
    settled = requests.processed >= requests.input_end
    exact = held == blocks_for(requests.processed, config.block_size)
    require(~resident | ~settled | exact, "it holds more blocks than its committed slots need")

    require(requests.processed <= requests.length, "more is processed than it has tokens")
    require(requests.length <= requests.max_session, "it is longer than its session limit")
    require(control.tokens.lengths == requests.length, "its token log and its length differ")
    live = (requests.status == RequestStatus.QUEUED) | (requests.status == RequestStatus.ACTIVE)
    require(~live | (requests.processed < requests.length), "it is live with nothing left to run")
    decode = live & settled
    require(
        ~decode | (requests.length - requests.processed == 1),
        "it decodes with other than one unprocessed token",
    )
    counted = np.array([len(carried.drafts) for carried in requests.carried], np.int64)
    require(requests.num_drafts == counted, "it has other drafts than it counts")
    require(live | (requests.num_drafts == 0), "it has drafts without a live turn")
    room = requests.max_session - requests.length
    room = np.where(
        requests.max_generated > 0, np.minimum(room, requests.max_generated - requests.generated), room
    )
    require(~live | (requests.num_drafts < room), "its drafts leave no room for a token behind them")
    require((requests.status != RequestStatus.ACTIVE) | resident, "it is active without being resident")
    published = np.array([event.request_id for event in control.events if event.request_id], np.uint64)
    known = np.isin(published, requests.id)
    found.extend(f"request {request_id}: it has events but is not there" for request_id in published[~known])
    counts = np.bincount(np.searchsorted(requests.id, published[known]), minlength=len(requests))
    require(requests.undrained == counts, "its events in the queue are not as many as it counts")
    suspected = np.array([member for group in control.suspects for member in group], np.uint64)
    found.extend(
        f"request {request_id}: it is a suspect without a live turn"
        for request_id in suspected[~np.isin(suspected, requests.id[live])]
    )
    if control.failure is not None:
        require(~live, "it is live although the engine has stopped")
    if len(found):
        raise InvariantViolation("; ".join(found))
