"""Exact paged attention in plain JAX: a walk over key tiles at absolute positions.

A row's keys lie in two places: committed ones in pages, this step's in the staged tokens. Taking "pages first, then
staged" would make the order of summation depend on how a prompt was cut. Here the walk goes over absolute positions,
each key comes from wherever it lies, and the arithmetic is the same either way, so a query's result does not depend on
chunking, on the rest of the batch, or on padding.

The running softmax is the one of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import QueryTiles

KEY_TILE = 256
"""Positions of one key tile, whatever the block size, so that the block size does not change the arithmetic."""


def paged_attention(
    query: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    scale: float,
) -> jax.Array:
    """Causal attention of packed rows over their committed pages and their staged tokens.

    Args:
        query: float[tokens, num_heads, head_dim]; rotary already applied.
        staged: dtype[tokens, 2, num_kv_heads, head_dim], this step's keys and values in the format of the pages.
        pages: dtype[num_blocks, block_size, 2, num_kv_heads, head_dim]; only read.
        block_table: int32[places, columns]; an entry outside [0, num_blocks) is a hole and is never read.
        tiles: The step's query tiles.
        tile_size: Queries a tile.
        scale: Factor on the scores.

    Returns:
        query's dtype[tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, _, num_kv_heads, _ = pages.shape
    num_tiles = tiles.place.shape[0]
    group = num_heads // num_kv_heads
    slots = pages.reshape(num_blocks * block_size, 2, num_kv_heads, head_dim)

    lanes = jnp.arange(tile_size)
    picked = query[jnp.minimum(tiles.start[:, None] + lanes, num_tokens - 1)].astype(jnp.float32) * scale
    # [tiles, kv_heads, group * tile_size, head_dim]: one batch element holds every query that shares its keys.
    picked = picked.reshape(num_tiles, tile_size, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    picked = picked.reshape(num_tiles, num_kv_heads, group * tile_size, head_dim)
    query_position = tiles.past[:, None] + (tiles.start - tiles.row_start)[:, None] + lanes
    query_position = jnp.where(lanes < tiles.count[:, None], query_position, -1)
    key_end = tiles.past + tiles.start - tiles.row_start + tiles.count
    query_position = jnp.tile(query_position, (1, group))[:, None, :, None]

    def walk(nth: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, output = carry
        position = nth * KEY_TILE + jnp.arange(KEY_TILE)
        column = jnp.minimum(position // block_size, block_table.shape[1] - 1)
        block = block_table[tiles.place[:, None], column]
        committed = position < tiles.past[:, None]
        hole = committed & ((block < 0) | (block >= num_blocks))
        slot = jnp.clip(block, 0, num_blocks - 1) * block_size + position % block_size
        fresh = jnp.clip(position - tiles.past[:, None] + tiles.row_start[:, None], 0, num_tokens - 1)
        kv = jnp.where(committed[:, :, None, None, None], slots[slot], staged[fresh]).astype(jnp.float32)
        # Slots that nothing has written may hold NaN: they are selected away, not multiplied by zero.
        written = (position < key_end[:, None]) & ~hole
        values = jnp.where(written[:, :, None, None], kv[:, :, 1], 0.0)

        scores = jnp.einsum("tkqd,tskd->tkqs", picked, kv[:, :, 0], preferred_element_type=jnp.float32)
        scores = jnp.where((position <= query_position) & ~hole[:, None, None, :], scores, -jnp.inf)
        best_now = jnp.maximum(best, scores.max(axis=-1, keepdims=True))
        finite = jnp.where(jnp.isneginf(best_now), 0.0, best_now)
        weights = jnp.exp(scores - finite)
        # A column of ones makes the product sum the weights too: XLA orders a plain sum by the size of the array.
        summed = jnp.concatenate([values, jnp.ones((*values.shape[:-1], 1))], axis=-1)
        product = jnp.einsum("tkqs,tskd->tkqd", weights, summed, preferred_element_type=jnp.float32)
        return best_now, output * jnp.exp(best - finite) + product

    shape = (num_tiles, num_kv_heads, group * tile_size)
    start = (jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, head_dim + 1)))
    _, output = jax.lax.fori_loop(0, tiles.num_key_tiles, walk, start)
    total = output[..., -1:]
    output = output[..., :-1] / jnp.where(total == 0.0, 1.0, total)
    output = output.reshape(num_tiles, num_kv_heads, group, tile_size, head_dim).transpose(0, 3, 1, 2, 4)
    return output.reshape(num_tiles * tile_size, num_heads, head_dim)[tiles.lane].astype(query.dtype)
