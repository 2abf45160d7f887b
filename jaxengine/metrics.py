"""Counts and sizes of an engine, read off its state."""

from __future__ import annotations

import dataclasses

from jaxengine.fixed_state import BANKS
from jaxengine.state import ACCEPTED, DEFERRALS, DRAFTED, FAILED_STEPS, PREEMPTIONS, STEPS, EngineState
from jaxengine.windows import bytes_per_slot, ring_of


@dataclasses.dataclass(frozen=True)
class EngineMetrics:
    """Counts and sizes of an engine.

    Attributes:
        steps: Committed steps that ran rows.
        rolled_back_steps: Steps that failed.
        deferred_rows: Rows that committed steps put off for lack of capacity.
        preemptions: How often a request gave its blocks back to run its tokens again later.
        drafted_tokens: Drafts that steps ran.
        accepted_drafts: Those whose keys and values steps committed: all that were right but one that ends its turn.
        residents: Requests that hold cache.
        free_blocks: Blocks that can be handed out.
        num_blocks: Blocks of the pool.
        pool_tokens: Tokens that the pool can hold.
        pool_bytes: Bytes of the pool's blocks over all layers that keep whole sequences.
        window_bytes: Bytes of the rings of windowed layers, for every place.
        fixed_bytes: Bytes of all slots of fixed states, both banks.
        live_fixed_bytes: Bytes of the current fixed states of residents.
        staging_bytes: Most bytes that a step stages: keys and values of its tokens, and its rows' next fixed states.
    """

    steps: int
    rolled_back_steps: int
    deferred_rows: int
    preemptions: int
    drafted_tokens: int
    accepted_drafts: int
    residents: int
    free_blocks: int
    num_blocks: int
    pool_tokens: int
    pool_bytes: int
    window_bytes: int
    fixed_bytes: int
    live_fixed_bytes: int
    staging_bytes: int


def metrics_of(state: EngineState) -> EngineMetrics:
    """Reads the metrics off a state."""
    control, config = state.control, state.control.config
    pages = state.store.pages
    fixed_bytes = sum(states.nbytes for states in state.store.fixed)
    per_slot = fixed_bytes // (BANKS * config.max_batch_size)
    residents = int((control.requests.place >= 0).sum())
    return EngineMetrics(
        steps=int(control.counters[STEPS]),
        rolled_back_steps=int(control.counters[FAILED_STEPS]),
        deferred_rows=int(control.counters[DEFERRALS]),
        preemptions=int(control.counters[PREEMPTIONS]),
        drafted_tokens=int(control.counters[DRAFTED]),
        accepted_drafts=int(control.counters[ACCEPTED]),
        residents=residents,
        free_blocks=len(control.free_blocks),
        num_blocks=control.num_blocks,
        pool_tokens=control.num_blocks * config.block_size,
        pool_bytes=sum(held.nbytes for held in pages if ring_of(held) is None),
        window_bytes=sum(held.nbytes for held in pages if ring_of(held) is not None),
        fixed_bytes=fixed_bytes,
        live_fixed_bytes=residents * per_slot,
        staging_bytes=config.max_scheduled_tokens * sum(map(bytes_per_slot, pages))
        + config.max_batch_size * per_slot,
    )
