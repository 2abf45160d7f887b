"""Counts and sizes of an engine, read off its state."""

from __future__ import annotations

import dataclasses

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


def metrics_of(state: EngineState) -> EngineMetrics:
    """Reads the metrics off a state."""
    control = state.control
    return EngineMetrics(
        steps=int(control.counters[STEPS]),
        rolled_back_steps=int(control.counters[FAILED_STEPS]),
        deferred_rows=int(control.counters[DEFERRALS]),
        preemptions=int(control.counters[PREEMPTIONS]),
        residents=int((control.requests.place >= 0).sum()),
        free_blocks=len(control.free_blocks),
        num_blocks=control.num_blocks,
        pool_tokens=control.num_blocks * control.config.block_size,
        pool_bytes=sum(pages.nbytes for pages in state.store.pages),
    )
