"""The Mosaic GPU kernel of ragged paged attention: a thread block for a query tile, a KV head and a split of its keys.

A warpgroup of its own brings key tiles into a ring of buffers (`bringing`); the others multiply, 64 packed queries
each, and keep a running softmax. All queries that share a KV head, of its whole
group of heads, are rows of one tile, so a key is read once for them. Keys come in the order of their positions, the
committed ones from pages in tiles at absolute positions, then those of this step; so a query's result depends on its
own row and on the split alone.

A slot that holds nothing may hold NaN: its score is selected away and its value is set to zero in shared memory before
the product, in the few tiles that have such slots. The running softmax is that of Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018), the division of labour between warpgroups that of Shah et al.,
"FlashAttention-3" (2024), and the split that of Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.bringing import KINDS, Ring, Sources, bring, bring_codes
from pallas_kernels.mosaic.units import ROWS, Units
from pallas_kernels.mosaic.walk import META, Extent, Layer, Pool, Walk
from pallas_kernels.tuning import Tuning

_LOG2E = math.log2(math.e)
_WIDE, _NARROW = 128, 64
# Registers of a thread that brings keys, and of one that multiplies, once three warpgroups do different work: together
# the 64 K of a multiprocessor.
_REGISTERS, _REGISTERS_WITH_CODES = (40, 232), (104, 200)
# Buffers that decoded codes go through, where there is room.
_DECODED = 2
_NEVER = 2**30


class Scratch(NamedTuple):
    """A thread block's shared memory.

    Attributes:
        query: The queries of each warpgroup that multiplies, dtype[consumers, ROWS, head_dim].
        out: Some columns of its output, out_dtype[consumers, ROWS, n]; None if they go where the queries were.
        total: Logarithms of its sums, float32[consumers, ROWS].
        sink: Its sinks, float32[consumers, ROWS].
        query_here: A barrier each, that its queries and sinks have come.
        values_clean: A barrier, that values of no key have been set to zero.
        ready: Tiles for the products.
        raw: Tiles of codes as they come; None without codes.
    """

    query: Any
    out: Any
    total: Any
    sink: Any
    query_here: Any
    values_clean: Any
    ready: Ring
    raw: Ring | None


def attention(
    queries: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    meta: jax.Array,
    sinks: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
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
        meta: int32[tiles, META]: place, past, position of the first query, number of queries, slot of the row's first
            token, its first key to be seen, and whether its table may have holes among its committed keys.
        sinks: float32[num_kv_heads, rows], the sink of each packed query, -inf for none.
        scales: If staged and pages are codes, those of the staged slots, float32[2, num_kv_heads, slots], and of the
            pages, float32[num_blocks, 2, num_kv_heads, block_size]; key_tile slots follow the last staged one.
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
    dtype, key_tile, splits = queries.dtype, tuning.key_tile, tuning.splits
    pool = Pool(pages.shape[0] // (2 * kv_heads), kv_heads, pages.shape[1], block_table.shape[1], key_tile)
    out_dtype = jnp.dtype(dtype if splits == 1 else jnp.float32)
    # A few columns at a time, where all at once would need more registers or shared memory than there is.
    few_columns = next(n for n in (_NARROW, 32, 48, 16) if head_dim % n == 0)
    columns_at_once = head_dim if head_dim <= _WIDE else few_columns
    # Queries are read before the output is written, so one buffer can serve both.
    shares_buffer = out_dtype == dtype
    out_width = head_dim if shares_buffer else few_columns
    registers = _REGISTERS if scales is None else _REGISTERS_WITH_CODES
    # Weights times scales may leave float16's range, not bfloat16's, and codes are exact in both.
    value_dtype = jnp.bfloat16 if scales is not None and dtype == jnp.float16 else dtype

    def body(*refs: Any) -> None:
        query_ref, table_ref, meta_ref, sink_ref, *source_refs, out_ref, total_ref, smem = refs
        warpgroup = lax.axis_index("warpgroup")
        item = lax.axis_index("item")
        split, head = lax.rem(item, splits), lax.rem(lax.div(item, splits), kv_heads)
        tile = lax.div(item, splits * kv_heads)
        ready = smem.ready

        # Each kind of warpgroup computes it anew, else its numbers would take registers of the other kind.
        def walked() -> Walk:
            return Walk.of(layer, tuning, pool, table_ref, [meta_ref[tile, i] for i in range(META)], split)

        def bringing() -> None:
            if consumers > 1:
                plgpu.set_max_registers(registers[0], action="decrease")
            walk = walked()
            if smem.raw is None:
                bring(walk, head, Sources(*source_refs), ready)
            else:
                bring_codes(walk, head, Sources(*source_refs), smem.raw, ready, units, few_columns)

        def multiplying() -> None:
            if consumers > 1:
                plgpu.set_max_registers(registers[1], action="increase")
            walk = walked()
            mine = pl.ds(warpgroup * ROWS, ROWS)
            for source, buffer in (
                (query_ref.at[tile, head, mine], smem.query),
                (sink_ref.at[head, mine], smem.sink),
            ):
                plgpu.copy_gmem_to_smem(source, buffer.at[warpgroup], smem.query_here.at[warpgroup])
            plgpu.barrier_wait(smem.query_here.at[warpgroup])
            nth_query = lax.div(units.row_numbers(ROWS) + warpgroup * ROWS, layer.group)
            query_position = jnp.where(nth_query < walk.count, walk.first + nth_query, -1)
            # A sink is a key that comes before all others: it sets the maximum and weighs one, with a value of zero.
            best = units.column(smem.sink[warpgroup]) * _LOG2E + jnp.where(split == 0, 0.0, -jnp.inf)
            weight = jnp.where(best == -jnp.inf, 0.0, 1.0)
            output = units.matrix(jnp.zeros((ROWS, head_dim), jnp.float32))

            def attend(
                step: jax.Array, carry: tuple[jax.Array, ...], *, whole: bool
            ) -> tuple[jax.Array, ...]:
                output, best, weight = carry
                slot = lax.rem(step, ready.size)
                plgpu.barrier_wait(ready.filled.at[ready.barrier(0, step)])
                scores = units.scores(smem.query.at[warpgroup], ready.rows[0].at[slot])
                scores = scaled(scores, 0, slot)
                plgpu.barrier_arrive(ready.free.at[ready.barrier(0, step)])
                factor = layer.scale * _LOG2E
                if layer.softcap is not None:
                    # tanh by its definition: the hardware's own is right to three digits.
                    power = jnp.exp2(scores * (2 * factor / layer.softcap))
                    scores, factor = 1.0 - 2.0 / (power + 1.0), layer.softcap * _LOG2E
                extent = None if whole else walk.extent(step)
                if extent is not None:
                    scores = jnp.where(seen(extent), scores, -jnp.inf)
                # The factor comes after the maximum, so that it costs no more than the subtraction.
                new_best = jnp.maximum(best, scores.max(axis=1) * factor)
                finite = jnp.where(new_best == -jnp.inf, 0.0, new_best)
                fade = jnp.exp2(best - finite)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(finite, scores.shape, (0,)))
                weight = weight * fade + weights.sum(axis=1)
                output = output * lax.broadcast_in_dim(fade, output.shape, (0,))
                plgpu.barrier_wait(ready.filled.at[ready.barrier(1, step)])
                if extent is not None and scales is None:
                    clean(slot, extent)
                weights = scaled(weights, 1, slot).astype(value_dtype)
                output = units.add_product(output, weights, ready.rows[1].at[slot])
                plgpu.barrier_arrive(ready.free.at[ready.barrier(1, step)])
                return output, new_best, weight

            def scaled(columns: jax.Array, kind: int, slot: jax.Array) -> jax.Array:
                """Multiplies [.., key_tile] by the scales of a buffer's rows, if these are codes."""
                if ready.scales is None:
                    return columns
                return columns * lax.broadcast_in_dim(
                    units.row(ready.scales[kind][slot]), columns.shape, (1,)
                )

            def seen(extent: Extent) -> jax.Array:
                """Whether queries see keys, bool[ROWS, key_tile]."""
                shape = (ROWS, key_tile)
                key = units.column_numbers(key_tile)
                key = lax.broadcast_in_dim(jnp.where(extent.is_key(key), key, _NEVER), shape, (1,))
                query = lax.broadcast_in_dim(query_position - extent.position, shape, (0,))
                return (
                    (key <= query) if layer.window is None else (key <= query) & (key > query - layer.window)
                )

            def clean(slot: jax.Array, extent: Extent) -> None:
                """Sets values to zero that belong to no key."""

                @pl.when(warpgroup == 0)
                def _select() -> None:
                    for at in range(0, key_tile, ROWS):
                        is_key = extent.is_key(units.row_numbers(ROWS) + at)
                        for column in range(0, head_dim, columns_at_once):
                            part = ready.rows[1].at[slot, pl.ds(at, ROWS), pl.ds(column, columns_at_once)]
                            values = units.matrix(part[...])
                            kept = lax.broadcast_in_dim(is_key, values.shape, (0,))
                            part[...] = jnp.where(kept, values, jnp.zeros_like(values))
                    plgpu.commit_smem()

                if consumers > 1:
                    plgpu.barrier_arrive(smem.values_clean)
                    plgpu.barrier_wait(smem.values_clean)

            carry = (output, best, weight)
            whole = jnp.int32(0)
            # With a window or a ring each tile may hold keys behind it.
            if layer.window is None and layer.ring is None and head_dim <= _WIDE:
                whole = walk.whole_steps()
                carry = lax.fori_loop(0, whole, functools.partial(attend, whole=True), carry)
            output, best, weight = lax.fori_loop(
                whole, walk.steps, functools.partial(attend, whole=False), carry
            )
            output = output / lax.broadcast_in_dim(jnp.where(weight == 0.0, 1.0, weight), output.shape, (0,))
            smem.total[warpgroup] = best + jnp.log2(weight)
            plgpu.commit_smem()
            out_rows = pl.ds(warpgroup * written, written)
            first_rows = pl.ds(0, written)
            plgpu.copy_smem_to_gmem(
                smem.total.at[warpgroup, first_rows], total_ref.at[split, tile, head, out_rows]
            )

            @pl.when((split == 0) | (walk.steps > 0))
            def _write() -> None:
                buffer = smem.query if shares_buffer else smem.out
                width = min(out_width, columns_at_once)
                for begin in range(0, head_dim, out_width):
                    for column in range(0, out_width, width):
                        taken = slice(begin + column, begin + column + width)
                        buffer[warpgroup, :, pl.ds(column, width)] = output[:, taken].astype(out_dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        buffer.at[warpgroup, first_rows],
                        out_ref.at[split, tile, head, out_rows, pl.ds(begin, out_width)],
                    )
                    plgpu.wait_smem_to_gmem(0)

            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == consumers, bringing, multiplying)

    def shared(shape: tuple[int, ...], kind: Any, width: int) -> Any:
        return plgpu.SMEM(shape, kind, transforms=units.transforms(width, kind))

    def row(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.float32)

    def ring(size: int, types: tuple[Any, Any], arrivals: int, width: int, readers: int = 0) -> Ring:
        return Ring(
            rows=tuple(shared((size, key_tile, head_dim), kind, width) for kind in types),
            filled=plgpu.Barrier(num_arrivals=arrivals, num_barriers=len(KINDS) * size),
            free=plgpu.Barrier(num_arrivals=readers, num_barriers=len(KINDS) * size) if readers else None,
        )

    if scales is None:
        raw, ready_ring = None, ring(tuning.stages, (dtype, dtype), pool.copies, head_dim, consumers)
    else:
        # Scales come in as many copies as keys do.
        raw = ring(tuning.stages, (pages.dtype, pages.dtype), 2 * pool.copies, few_columns)
        raw = raw._replace(scales=row(raw.size, pool.copies, len(KINDS), pool.copied))
        size = _DECODED if head_dim <= _WIDE else 1
        ready_ring = ring(size, (dtype, value_dtype), 1, head_dim, consumers)
        ready_ring = ready_ring._replace(scales=tuple(row(size, key_tile) for _ in KINDS))
    scratch = Scratch(
        query=shared((consumers, ROWS, head_dim), dtype, head_dim),
        out=None if shares_buffer else shared((consumers, ROWS, out_width), out_dtype, out_width),
        total=row(consumers, ROWS),
        sink=row(consumers, ROWS),
        query_here=plgpu.Barrier(num_arrivals=2, num_barriers=consumers),
        values_clean=plgpu.Barrier(num_arrivals=consumers),
        ready=ready_ring,
        raw=raw,
    )
    inputs = [queries, block_table, meta, sinks, staged, pages, *(scales or ())]
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, used, head_dim), out_dtype),
            jax.ShapeDtypeStruct((splits, num_tiles, kv_heads, used), jnp.float32),
        ],
        scratch_types=[scratch],
        grid=(num_tiles * kv_heads * splits,),
        grid_names=("item",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs)
