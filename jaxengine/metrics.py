"""Counts and sizes of an engine, read off its state."""

from __future__ import annotations

import dataclasses

from jaxengine.fixed_state import BANKS
from jaxengine.state import DEFERRALS, FAILED_STEPS, PREEMPTIONS, STEPS, EngineState


@dataclasses.dataclass(frozen=True)
class EngineMetrics:
    """Counts and sizes of an engine.

    Attributes:
        steps: Committed steps that ran rows.
        rolled_back_steps: Steps that failed.
        deferred_rows: Rows that committed steps put off for lack of capacity.
        preemptions: How often a request gave its blocks back to run its tokens again later.
        residents: Requests that hold cache.
        free_blocks: Blocks that can be handed out.
        num_blocks: Blocks of the pool.
        pool_tokens: Tokens that the pool can hold.
        pool_bytes: Bytes of the pages of all layers.
        fixed_bytes: Bytes of all slots of fixed states, both banks.
        live_fixed_bytes: Bytes of the current fixed states of residents.
        staging_bytes: Most bytes that a step stages: keys and values of its tokens, and its rows' next fixed states.
    """

    steps: int
    rolled_back_steps: int
    deferred_rows: int
    preemptions: int
    residents: int
    free_blocks: int
    num_blocks: int
    pool_tokens: int
    pool_bytes: int
    fixed_bytes: int
    live_fixed_bytes: int
    staging_bytes: int


def metrics_of(state: EngineState) -> EngineMetrics:
    """Reads the metrics off a state."""
    control, config = state.control, state.control.config
    pool_bytes = sum(pages.nbytes for pages in state.store.pages)
    pool_tokens = control.num_blocks * config.block_size
    fixed_bytes = sum(states.nbytes for states in state.store.fixed)
    per_slot = fixed_bytes // (BANKS * config.max_batch_size)
    residents = int((control.requests.place >= 0).sum())
    return EngineMetrics(
        steps=int(control.counters[STEPS]),
        rolled_back_steps=int(control.counters[FAILED_STEPS]),
        deferred_rows=int(control.counters[DEFERRALS]),
        preemptions=int(control.counters[PREEMPTIONS]),
        residents=residents,
        free_blocks=len(control.free_blocks),
        num_blocks=control.num_blocks,
        pool_tokens=pool_tokens,
        pool_bytes=pool_bytes,
        fixed_bytes=fixed_bytes,
        live_fixed_bytes=residents * per_slot,
        staging_bytes=config.max_scheduled_tokens * pool_bytes // pool_tokens
        + config.max_batch_size * per_slot,
    )
