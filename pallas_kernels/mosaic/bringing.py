"""The warpgroup of the attention kernel that brings key tiles: by bulk copies, block by block through the table.

Pages in the queries' type land in the buffers that the products read. Codes land in a ring of their own, and the same
warpgroup turns them into numbers in a shorter ring that the products read: all codes of 8 bits are exact there. Their
scales, which aren't, are left to the products' results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.units import ROWS, Units
from pallas_kernels.mosaic.walk import STAGED_ALIGNMENT, Walk

KINDS = (0, 1)
"""Keys and values."""


class Sources(NamedTuple):
    """Arrays in the card's memory, as `attention` takes them; no scales without codes."""

    staged: Any
    pages: Any
    staged_scales: Any = None
    page_scales: Any = None


class Ring(NamedTuple):
    """Buffers for tiles in shared memory, a pair of keys and values each, and what says that one is full.

    Attributes:
        rows: Of each kind, dtype[buffers, key_tile, head_dim].
        filled: A barrier for each buffer of each kind, keys first.
        free: Likewise, what says that a buffer has been read; None if whoever reads it fills it.
        scales: Those of the rows. As they come, float32[buffers, copies, 2, copied]; for products, float32[buffers,
            key_tile] of each kind; None for rows that are no codes.
    """

    rows: tuple[Any, Any]
    filled: Any
    free: Any = None
    scales: Any = None

    @property
    def size(self) -> int:
        """Its buffers."""
        return int(self.rows[0].shape[0])

    def barrier(self, kind: int, step: jax.Array) -> jax.Array:
        """The number of a step's barriers."""
        return kind * self.size + lax.rem(step, self.size)

    def wait_until_free(self, kind: int, step: jax.Array) -> None:
        """Waits until what was in a step's buffer has been read."""

        @pl.when(step >= self.size)
        def _wait() -> None:
            plgpu.barrier_wait(self.free.at[self.barrier(kind, step)])

    def drain(self, steps: jax.Array) -> None:
        """Waits until all has been read: who leaves early would leave barriers in a phase that nobody saw."""

        @pl.loop(jnp.maximum(steps - self.size, 0), steps)
        def _drain(step: jax.Array) -> None:
            for kind in KINDS:
                plgpu.barrier_wait(self.free.at[self.barrier(kind, step)])


def bring(walk: Walk, head: jax.Array, sources: Sources, ready: Ring) -> None:
    """Copies every step's tile of a KV head into the ring that the products read."""

    @pl.loop(0, walk.steps)
    def _fill(step: jax.Array) -> None:
        for kind in KINDS:
            ready.wait_until_free(kind, step)
        _copy(walk, head, step, sources, ready)

    ready.drain(walk.steps)


def bring_codes(
    walk: Walk, head: jax.Array, sources: Sources, raw: Ring, ready: Ring, units: Units, columns: int
) -> None:
    """Copies every step's codes into one ring and turns them, `columns` at a time, into numbers in the other."""

    @pl.loop(0, jnp.minimum(walk.steps, raw.size))
    def _begin(step: jax.Array) -> None:
        _copy(walk, head, step, sources, raw)

    @pl.loop(0, walk.steps)
    def _fill(step: jax.Array) -> None:
        for kind in KINDS:
            plgpu.barrier_wait(raw.filled.at[raw.barrier(kind, step)])
            ready.wait_until_free(kind, step)
            _decode(walk, kind, step, raw, ready, units, columns)
            # Also orders these reads before the copy that comes into the same buffer.
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.filled.at[ready.barrier(kind, step)])

        @pl.when(step + raw.size < walk.steps)
        def _next() -> None:
            _copy(walk, head, step + raw.size, sources, raw)

    ready.drain(walk.steps)


def _copy(walk: Walk, head: jax.Array, step: jax.Array, sources: Sources, ring: Ring) -> None:
    """Begins the copies of a step's tile."""
    pool, slot = walk.pool, lax.rem(step, ring.size)

    def begin(source: Any, kind: int, at: int, size: int) -> None:
        buffer = ring.rows[kind].at[slot, pl.ds(at, size)]
        plgpu.copy_gmem_to_smem(source, buffer, ring.filled.at[ring.barrier(kind, step)])

    def begin_scales(source: Any, nth: int) -> None:
        # One copy brings those of both kinds, of which the keys' are the first to be waited for.
        plgpu.copy_gmem_to_smem(source, ring.scales.at[slot, nth], ring.filled.at[ring.barrier(0, step)])
        plgpu.barrier_arrive(ring.filled.at[ring.barrier(1, step)])

    @pl.when(step < walk.page_steps)
    def _pages() -> None:
        start = lax.rem((walk.begin + step) * pool.key_tile, pool.block_size)
        blocks = [jnp.clip(block, 0, pool.num_blocks - 1) for block in walk.blocks(step)]
        slots = (
            pl.ds(pl.multiple_of(start, pool.key_tile), pool.copied)
            if pool.copied < pool.block_size
            else pl.ds(0, pool.copied)
        )
        for kind in KINDS:
            for i, block in enumerate(blocks):
                row = block * (2 * pool.kv_heads) + kind * pool.kv_heads + head
                begin(sources.pages.at[row, slots], kind, i * pool.copied, pool.copied)
        if ring.scales is not None:
            for i, block in enumerate(blocks):
                begin_scales(sources.page_scales.at[block, :, head, slots], i)

    @pl.when(step >= walk.page_steps)
    def _staged() -> None:
        start = pl.multiple_of(walk.staged_start + walk.nth_staged(step), STAGED_ALIGNMENT)
        for kind in KINDS:
            for i in range(pool.copies):
                size = min(pool.copied, walk.tuning.staged_tile - i * pool.copied)
                if size > 0:
                    row = kind * pool.kv_heads + head
                    source = sources.staged.at[pl.ds(start + i * pool.copied, size), row]
                    begin(source, kind, i * pool.copied, size)
                else:
                    plgpu.barrier_arrive(ring.filled.at[ring.barrier(kind, step)])
        if ring.scales is not None:
            for i in range(pool.copies):
                slots = pl.ds(start + i * pool.copied, pool.copied)
                begin_scales(sources.staged_scales.at[:, head, slots], i)


def _decode(
    walk: Walk, kind: int, step: jax.Array, raw: Ring, ready: Ring, units: Units, columns: int
) -> None:
    """Turns a tile's codes into numbers, and leaves its scales in one row.

    Values that belong to no key become zero, and so do their scales. Keys may stay what they are, since their scores
    are selected away.
    """
    pool, come, to = walk.pool, lax.rem(step, raw.size), lax.rem(step, ready.size)
    extent = walk.extent(step) if kind else None
    source, target = raw.rows[kind], ready.rows[kind]
    for at in range(0, pool.key_tile, ROWS):
        for column in range(0, source.shape[-1], columns):
            part = pl.ds(at, ROWS), pl.ds(column, columns)
            numbers = units.decoded(source.at[(come, *part)], target.dtype)
            if extent is not None:
                is_key = extent.is_key(units.decoded_row_numbers(ROWS) + at)
                numbers = jnp.where(units.decoded_columns(is_key, columns), numbers, jnp.zeros_like(numbers))
            target[(to, *part)] = numbers
    for i in range(pool.copies):
        scales = units.row(raw.scales[come, i, kind])
        if extent is not None:
            is_key = extent.is_key(units.column_numbers(pool.copied) + i * pool.copied)
            scales = jnp.where(is_key, scales, jnp.zeros_like(scales))
        ready.scales[kind][to, pl.ds(i * pool.copied, pool.copied)] = scales
