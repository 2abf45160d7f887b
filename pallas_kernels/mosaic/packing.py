"""How a packed step becomes what the attention kernel reads, and its splits become the step's output again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.attention import attention
from pallas_kernels.mosaic.units import ROWS, Units
from pallas_kernels.mosaic.walk import STAGED_ALIGNMENT, Layer
from pallas_kernels.tiles import QueryTiles
from pallas_kernels.tuning import Tuning


def ragged_attention(
    query: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    tiles: QueryTiles,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None,
    *,
    tile_size: int,
    layer: Layer,
    tuning: Tuning,
    units: Units,
    interpret: Any = False,
) -> jax.Array:
    """Runs the kernel over a step laid out as `paged_attention` takes it.

    Returns:
        query's dtype[tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, _, kv_heads, block_size, _ = pages.shape
    group, num_tiles = layer.group, tiles.place.shape[0]
    rows = -(-tile_size * group // ROWS) * ROWS

    token = jnp.minimum(tiles.start[:, None] + jnp.arange(tile_size), num_tokens - 1)
    packed = query[token].reshape(num_tiles, tile_size, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(num_tiles, kv_heads, tile_size * group, head_dim)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, rows - tile_size * group), (0, 0)))

    own_start = _aligned_starts(tiles)
    nth = jnp.arange(num_tokens) - tiles.start[tiles.lane // tile_size]
    tile = jnp.asarray(tiles.lane) // tile_size
    slot = own_start[tile] + tiles.start[tile] - tiles.row_start[tile] + nth
    is_token = (nth >= 0) & (nth < tiles.num_queries[tile])
    num_slots = -(-num_tokens // STAGED_ALIGNMENT) * STAGED_ALIGNMENT
    num_slots += num_tiles * STAGED_ALIGNMENT + tuning.key_tile
    slots = _in_slots(staged.reshape(num_tokens, 2 * kv_heads, head_dim), is_token, slot, num_slots)
    kernel_scales = None
    if scales is not None:
        in_slots = _in_slots(scales[0], is_token, slot, num_slots)
        kernel_scales = (in_slots.transpose(1, 2, 0), jnp.asarray(scales[1]))

    first = tiles.past + tiles.start - tiles.row_start
    low = jnp.zeros_like(first) if layer.window is None else jnp.maximum(first - layer.window + 1, 0)
    holes = jnp.zeros_like(first)
    if layer.ring is None:
        table = jnp.asarray(block_table)
        column = jnp.arange(table.shape[1])
        used = (column >= (low // block_size)[:, None]) & (column < -(-tiles.past // block_size)[:, None])
        outside = (table < 0) | (table >= num_blocks)
        holes = (outside[tiles.place] & used).any(axis=1).astype(jnp.int32)
    meta = jnp.stack([tiles.place, tiles.past, first, tiles.num_queries, own_start, low, holes], axis=1)
    sink_rows = jnp.full((kv_heads, rows), -jnp.inf)
    if sinks is not None:
        of_query = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, tile_size))
        sink_rows = sink_rows.at[:, : tile_size * group].set(of_query)

    output, total = attention(
        packed,
        slots,
        pages.reshape(num_blocks * 2 * kv_heads, block_size, head_dim),
        jnp.asarray(block_table),
        meta.astype(jnp.int32),
        sink_rows,
        kernel_scales,
        used=rows if rows > ROWS else -(-tile_size * group // 8) * 8,
        layer=layer,
        tuning=tuning,
        units=units,
        interpret=interpret,
    )
    merged = output[0] if tuning.splits == 1 else _merge(output, total)
    merged = merged[:, :, : tile_size * group].reshape(num_tiles, kv_heads, tile_size, group, head_dim)
    merged = merged.transpose(0, 2, 1, 3, 4).reshape(num_tiles * tile_size, num_heads, head_dim)
    return merged[tiles.lane].astype(query.dtype)


def _aligned_starts(tiles: QueryTiles) -> jax.Array:
    """int32[tiles], where the tokens of each tile's row begin among slots: at multiples of the alignment, disjoint."""
    row_start = jnp.asarray(tiles.row_start)
    row = jnp.cumsum((tiles.start == tiles.row_start) & (tiles.num_queries > 0)) - 1
    return (-(-row_start // STAGED_ALIGNMENT) + jnp.maximum(row, 0)) * STAGED_ALIGNMENT


def _in_slots(tokens: jax.Array, is_token: jax.Array, slot: jax.Array, num_slots: int) -> jax.Array:
    """Lays [tokens, ...] out as [num_slots, ...], zero where there is no token."""
    slots = jnp.zeros((num_slots, *tokens.shape[1:]), tokens.dtype)
    return slots.at[jnp.where(is_token, slot, num_slots)].set(tokens, mode="drop")


def _merge(output: jax.Array, total: jax.Array) -> jax.Array:
    """float32[tiles, num_kv_heads, rows, head_dim]: the splits' mean, weighted by 2 to the power of `total`."""
    most = total.max(axis=0)
    weight = jnp.exp2(total - jnp.where(jnp.isneginf(most), 0.0, most))
    # What a split without keys has not written may hold NaN.
    parts = jnp.where(weight[..., None] > 0, output * weight[..., None], 0.0).sum(axis=0)
    sum_ = weight.sum(axis=0)[..., None]
    return parts / jnp.where(sum_ == 0.0, 1.0, sum_)
