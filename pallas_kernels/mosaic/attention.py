"""The Mosaic GPU kernel of ragged paged attention: a thread block for a query tile, a KV head and a split of its keys.

A warpgroup of its own brings key tiles into a ring of buffers by bulk copies, block by block through the table; the
others multiply, 64 packed queries each, and keep a running softmax. All queries that share a KV head, of its whole
group of heads, are rows of one tile, so a key is read once for them. Keys come in the order of their positions, the
committed ones from pages in tiles at absolute positions, then those of this step; so a query's result depends on its
own row and on the split alone.

A slot that holds nothing may hold NaN: its score is selected away and its value is set to zero in shared memory before
the product, in the few tiles that have such slots. The running softmax is that of Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018), the division of labour between warpgroups that of Shah et al.,
"FlashAttention-3" (2024), and the split that of Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.units import ROWS, Units

STAGED_ALIGNMENT = 8
"""Rows at whose multiples a bulk copy may begin in an array that lies in tiles of eight rows."""

_LOG2E = math.log2(math.e)
_WIDE, _NARROW = 128, 64
# Registers of a thread once three warpgroups do different work: together the 64 K of a multiprocessor.
_COPYING_REGISTERS = 40
_MULTIPLYING_REGISTERS = 232
_META = 7
_NEVER = 2**30


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; changes no result but by rounding.

    Attributes:
        key_tile: Keys of a step through the pages; a multiple of 64.
        staged_tile: Keys of a step through this step's tokens; a multiple of 16, at most `key_tile`.
        stages: Buffers of the ring, each for a key tile and its values.
        splits: Thread blocks that share a query tile's committed keys.
        split_tiles: Key tiles of each split; None divides each row's tiles among all.
    """

    key_tile: int
    staged_tile: int
    stages: int
    splits: int = 1
    split_tiles: int | None = None


@dataclasses.dataclass(frozen=True)
class Layer:
    """What all query tiles have in common.

    Attributes:
        group: Heads that share a KV head.
        scale: Factor on the scores, positive.
        window: Keys that a query sees, itself included; None for all.
        softcap: A scaled score s becomes softcap * tanh(s / softcap); None leaves it.
        ring: Blocks that each place owns, in which case the table isn't read.
    """

    group: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    ring: int | None = None


def attention(
    queries: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    meta: jax.Array,
    sinks: jax.Array,
    *,
    used: int,
    layer: Layer,
    tuning: Tuning,
    units: Units,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Each split's attention, normalised by its own weights, and the logarithm of their sum.

    Args:
        queries: dtype[tiles, num_kv_heads, rows, head_dim], rows a multiple of 64; row r is head r % group of the
            tile's query r // group.
        staged: dtype[slots, 2 * num_kv_heads, head_dim]; a row's tokens lie behind each other from a multiple of
            STAGED_ALIGNMENT on, and staged_tile slots follow the last one.
        pages: dtype[num_blocks * 2 * num_kv_heads, block_size, head_dim].
        block_table: int32[places, columns].
        meta: int32[tiles, 7]: place, past, position of the first query, number of queries, slot of the row's first
            token, its first key to be seen, and whether its table may have holes among its committed keys.
        sinks: float32[num_kv_heads, rows], the sink of each packed query, -inf for none.
        used: Rows of a tile that are wanted: all, or of 64 rows the first multiple of 8.
        layer: What the tiles have in common.
        tuning: How the work is cut.
        units: Products and layouts.
        interpret: False, or Pallas' parameters for running on a CPU.

    Returns:
        float32 (dtype if there is one split)[splits, tiles, num_kv_heads, used, head_dim], not written where the
        second, float32[splits, tiles, num_kv_heads, used], is -inf; that one is in base 2.
    """
    num_tiles, kv_heads, rows, head_dim = queries.shape
    consumers = rows // ROWS
    written = used // consumers
    block_size, num_blocks = pages.shape[1], pages.shape[0] // (2 * kv_heads)
    num_columns, dtype = block_table.shape[1], queries.dtype
    key_tile, stages, splits = tuning.key_tile, tuning.stages, tuning.splits
    copied = min(block_size, key_tile)
    copies = key_tile // copied
    out_dtype = jnp.dtype(dtype if splits == 1 else jnp.float32)
    # A few columns at a time, where all at once would need more registers or shared memory than there is.
    columns_at_once = head_dim if head_dim <= _WIDE else _NARROW
    # Queries are read before the output is written, so one buffer can serve both.
    shares_buffer = out_dtype == dtype
    out_width = head_dim if shares_buffer else columns_at_once

    def block_of(table: Any, place: jax.Array, column: jax.Array) -> jax.Array:
        if layer.ring is not None:
            return place * layer.ring + lax.rem(column, layer.ring)
        return table[place, jnp.minimum(column, num_columns - 1)]

    def body(
        query_ref: Any,
        staged_ref: Any,
        page_ref: Any,
        table_ref: Any,
        meta_ref: Any,
        sink_ref: Any,
        out_ref: Any,
        total_ref: Any,
        query_smem: Any,
        key_smem: Any,
        value_smem: Any,
        out_smem: Any,
        total_smem: Any,
        sink_smem: Any,
        filled: Any,
        free: Any,
        query_here: Any,
        values_clean: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        item = lax.axis_index("item")
        split, head = lax.rem(item, splits), lax.rem(lax.div(item, splits), kv_heads)
        tile = lax.div(item, splits * kv_heads)
        place, past, first, count, staged_start, low, has_holes = (meta_ref[tile, i] for i in range(_META))

        first_tile = lax.div(jnp.minimum(low, past), key_tile)
        page_tiles = pl.cdiv(past, key_tile) - first_tile
        share = pl.cdiv(page_tiles, splits) if tuning.split_tiles is None else tuning.split_tiles
        begin = jnp.minimum(split * share, page_tiles)
        page_steps = jnp.where(count > 0, jnp.minimum(begin + share, page_tiles) - begin, 0)
        begin += first_tile
        # The first split, which every row has, takes this step's keys too, counted from the row's first token.
        low_staged = lax.div(jnp.maximum(low - past, 0), STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        num_staged = jnp.where((split == 0) & (count > 0), first + count - past - low_staged, 0)
        steps = page_steps + pl.cdiv(num_staged, tuning.staged_tile)

        def nth_staged(step: jax.Array) -> jax.Array:
            return low_staged + (step - page_steps) * tuning.staged_tile

        def blocks_of(step: jax.Array) -> list[jax.Array]:
            column = lax.div((begin + step) * key_tile, block_size)
            return [block_of(table_ref, place, column + i) for i in range(copies)]

        def copy(source: Any, kind: int, slot: jax.Array, at: int, size: int) -> None:
            buffer = (key_smem, value_smem)[kind].at[slot, pl.ds(at, size)]
            plgpu.copy_gmem_to_smem(source, buffer, filled.at[kind * stages + slot])

        @pl.when(warpgroup == consumers)
        def _copying() -> None:
            if consumers > 1:
                plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")

            @pl.loop(0, steps)
            def _fill(step: jax.Array) -> None:
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _wait() -> None:
                    for kind in (0, 1):
                        plgpu.barrier_wait(free.at[kind * stages + slot])

                @pl.when(step < page_steps)
                def _pages() -> None:
                    start = lax.rem((begin + step) * key_tile, block_size)
                    rows_of = [
                        jnp.clip(block, 0, num_blocks - 1) * (2 * kv_heads) + head
                        for block in blocks_of(step)
                    ]
                    for kind in (0, 1):
                        for i, row in enumerate(rows_of):
                            source = page_ref.at[row + kind * kv_heads]
                            if copied < block_size:
                                source = source.at[pl.ds(pl.multiple_of(start, key_tile), copied)]
                            copy(source, kind, slot, i * copied, copied)

                @pl.when(step >= page_steps)
                def _staged() -> None:
                    start = pl.multiple_of(staged_start + nth_staged(step), STAGED_ALIGNMENT)
                    for kind in (0, 1):
                        for i in range(copies):
                            size = min(copied, tuning.staged_tile - i * copied)
                            if size > 0:
                                source = staged_ref.at[
                                    pl.ds(start + i * copied, size), kind * kv_heads + head
                                ]
                                copy(source, kind, slot, i * copied, size)
                            else:
                                plgpu.barrier_arrive(filled.at[kind * stages + slot])

            # Whoever leaves early would leave barriers in a phase that nobody saw.
            @pl.loop(jnp.maximum(steps - stages, 0), steps)
            def _drain(step: jax.Array) -> None:
                for kind in (0, 1):
                    plgpu.barrier_wait(free.at[kind * stages + lax.rem(step, stages)])

        @pl.when(warpgroup < consumers)
        def _multiplying() -> None:
            if consumers > 1:
                plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
            mine = pl.ds(warpgroup * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                query_ref.at[tile, head, mine], query_smem.at[warpgroup], query_here.at[warpgroup]
            )
            plgpu.copy_gmem_to_smem(
                sink_ref.at[head, mine], sink_smem.at[warpgroup], query_here.at[warpgroup]
            )
            plgpu.barrier_wait(query_here.at[warpgroup])
            nth_query = lax.div(units.row_numbers(ROWS) + warpgroup * ROWS, layer.group)
            query_position = jnp.where(nth_query < count, first + nth_query, -1)
            # A sink is a key that comes before all others: it sets the maximum and weighs one, with a value of zero.
            best = units.column(sink_smem[warpgroup]) * _LOG2E + jnp.where(split == 0, 0.0, -jnp.inf)
            weight = jnp.where(best == -jnp.inf, 0.0, 1.0)
            output = units.matrix(jnp.zeros((ROWS, head_dim), jnp.float32))

            def attend(
                step: jax.Array, carry: tuple[jax.Array, ...], *, whole: bool
            ) -> tuple[jax.Array, ...]:
                output, best, weight = carry
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(filled.at[slot])
                scores = units.scores(query_smem.at[warpgroup], key_smem.at[slot])
                plgpu.barrier_arrive(free.at[slot])
                factor = layer.scale * _LOG2E
                if layer.softcap is not None:
                    # tanh by its definition: the hardware's own is right to three digits.
                    power = jnp.exp2(scores * (2 * factor / layer.softcap))
                    scores, factor = 1.0 - 2.0 / (power + 1.0), layer.softcap * _LOG2E
                if not whole:
                    position, begin_at, end_at, holes = extent(step)
                    scores = jnp.where(seen(position, begin_at, end_at, holes), scores, -jnp.inf)
                # The factor comes after the maximum, so that it costs no more than the subtraction.
                new_best = jnp.maximum(best, scores.max(axis=1) * factor)
                finite = jnp.where(new_best == -jnp.inf, 0.0, new_best)
                fade = jnp.exp2(best - finite)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(finite, scores.shape, (0,)))
                weight = weight * fade + weights.sum(axis=1)
                output = output * lax.broadcast_in_dim(fade, output.shape, (0,))
                plgpu.barrier_wait(filled.at[stages + slot])
                if not whole:
                    clean(slot, begin_at - position, end_at - position, holes)
                output = units.add_product(output, weights.astype(dtype), value_smem.at[slot])
                plgpu.barrier_arrive(free.at[stages + slot])
                return output, new_best, weight

            def extent(step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
                """Position of the tile, of its first key that is one, of the end of those, and holes between."""
                in_pages = step < page_steps
                oldest = low if layer.ring is None else jnp.maximum(low, past - layer.ring * block_size)
                position = jnp.where(in_pages, (begin + step) * key_tile, past + nth_staged(step))
                begin_at = jnp.where(in_pages, oldest, jnp.maximum(low, past))
                end_at = jnp.where(in_pages, past, jnp.minimum(first + count, position + tuning.staged_tile))
                if layer.ring is not None:
                    return position, begin_at, end_at, []
                holes = [
                    in_pages & (has_holes > 0) & ((block < 0) | (block >= num_blocks))
                    for block in blocks_of(jnp.where(in_pages, step, 0))
                ]
                return position, begin_at, end_at, holes

            def seen(
                position: jax.Array, begin_at: jax.Array, end_at: jax.Array, holes: list[jax.Array]
            ) -> jax.Array:
                shape = (ROWS, key_tile)
                key = units.column_numbers(key_tile)
                is_key = is_key_of(key, begin_at - position, end_at - position, holes)
                key = lax.broadcast_in_dim(jnp.where(is_key, key, _NEVER), shape, (1,))
                query = lax.broadcast_in_dim(query_position - position, shape, (0,))
                return (
                    (key <= query) if layer.window is None else (key <= query) & (key > query - layer.window)
                )

            def is_key_of(
                key: jax.Array, begin_at: jax.Array, end_at: jax.Array, holes: list[jax.Array]
            ) -> jax.Array:
                """Whether numbers of a tile are those of keys."""
                result = (key >= begin_at) & (key < end_at)
                for i, hole in enumerate(holes):
                    end = jnp.where(hole, (i + 1) * copied, 0)
                    result &= (key < i * copied) | (key >= end)
                return result

            def clean(
                slot: jax.Array, begin_at: jax.Array, end_at: jax.Array, holes: list[jax.Array]
            ) -> None:
                """Sets values to zero that belong to no key."""

                @pl.when(warpgroup == 0)
                def _select() -> None:
                    for at in range(0, key_tile, ROWS):
                        is_key = is_key_of(units.row_numbers(ROWS) + at, begin_at, end_at, holes)
                        for column in range(0, head_dim, columns_at_once):
                            part = value_smem.at[slot, pl.ds(at, ROWS), pl.ds(column, columns_at_once)]
                            values = units.matrix(part[...])
                            kept = lax.broadcast_in_dim(is_key, values.shape, (0,))
                            part[...] = jnp.where(kept, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                if consumers > 1:
                    plgpu.barrier_arrive(values_clean)
                    plgpu.barrier_wait(values_clean)

            carry = (output, best, weight)
            # Whole tiles lie in pages before the last committed key; with a window each may hold keys behind it.
            full = jnp.int32(0)
            if layer.window is None and layer.ring is None and head_dim <= _WIDE:
                full = jnp.clip(lax.div(past, key_tile) - begin, 0, page_steps)
                full = jnp.where(has_holes > 0, 0, full)
                carry = lax.fori_loop(0, full, lambda step, carry: attend(step, carry, whole=True), carry)
            output, best, weight = lax.fori_loop(
                full, steps, lambda step, carry: attend(step, carry, whole=False), carry
            )
            output = output / lax.broadcast_in_dim(jnp.where(weight == 0.0, 1.0, weight), output.shape, (0,))
            total_smem[warpgroup] = best + jnp.log2(weight)
            plgpu.commit_smem()
            out_rows = pl.ds(warpgroup * written, written)
            first_rows = pl.ds(0, written)
            plgpu.copy_smem_to_gmem(
                total_smem.at[warpgroup, first_rows], total_ref.at[split, tile, head, out_rows]
            )

            @pl.when((split == 0) | (steps > 0))
            def _write() -> None:
                buffer = query_smem if shares_buffer else out_smem
                for begin in range(0, head_dim, out_width):
                    for column in range(0, out_width, columns_at_once):
                        taken = slice(begin + column, begin + column + columns_at_once)
                        buffer[warpgroup, :, pl.ds(column, columns_at_once)] = output[:, taken].astype(
                            out_dtype
                        )
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        buffer.at[warpgroup, first_rows],
                        out_ref.at[split, tile, head, out_rows, pl.ds(begin, out_width)],
                    )
                    plgpu.wait_smem_to_gmem(0)

            plgpu.wait_smem_to_gmem(0)

    def shared(shape: tuple[int, ...], kind: Any) -> Any:
        return plgpu.SMEM(shape, kind, transforms=units.transforms(shape[-1], kind))

    scratch = (
        shared((consumers, ROWS, head_dim), dtype),
        shared((stages, key_tile, head_dim), dtype),
        shared((stages, key_tile, head_dim), dtype),
        None if shares_buffer else shared((consumers, ROWS, out_width), out_dtype),
        plgpu.SMEM((consumers, ROWS), jnp.float32),
        plgpu.SMEM((consumers, ROWS), jnp.float32),
        plgpu.Barrier(num_arrivals=copies, num_barriers=2 * stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=2 * stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=consumers),
        plgpu.Barrier(num_arrivals=consumers),
    )
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, used, head_dim), out_dtype),
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, used), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(num_tiles * kv_heads * splits,),
        grid_names=("item",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(queries, staged, pages, block_table, meta, sinks)
