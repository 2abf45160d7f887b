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

from pallas_kernels.tiles import QueryTiles, windowed_key_tiles

KEY_TILE = 128
"""Positions of one key tile, whatever the block size, so that the block size does not change the arithmetic."""

_MAX_PRODUCT_ROWS = 48
"""XLA on CPU takes another kernel, with other bits, for products over KEY_TILE of more than 50 rows."""


def exact_attention(
    query: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: int | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attention as `paged_attention` describes it, with the same arguments, on any platform.

    With a window each query tile begins its walk at the first key tile that it sees, so that the context before costs
    nothing; the other keys behind the window are hidden. Neither changes a bit, because a hidden key adds zero and
    leaves the running maximum as it is. What a ring's slot held before is hidden like an unwritten one, so the bits are
    those of a whole table, as long as the window needs no older key. Codes are read as float32(code) * scale.

    Returns:
        query's dtype[tokens, num_heads, head_dim].
    """
    query, staged, pages, block_table = map(jnp.asarray, (query, staged, pages, block_table))
    scales = None if scales is None else (jnp.asarray(scales[0]), jnp.asarray(scales[1]))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    num_tiles = tiles.place.shape[0]

    lanes = jnp.arange(tile_size)
    picked = query[jnp.minimum(tiles.start[:, None] + lanes, num_tokens - 1)].astype(jnp.float32) * scale
    # [tiles, kv_heads, group * tile_size, head_dim]: one batch element holds every query that shares its keys.
    picked = picked.reshape(num_tiles, tile_size, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    picked = picked.reshape(num_tiles, num_kv_heads, group * tile_size, head_dim)
    # A product with one row goes another way through XLA on CPU, with other bits.
    queries = max(group * tile_size, 2)
    picked = jnp.pad(picked, ((0, 0), (0, 0), (0, queries - group * tile_size), (0, 0)))
    first_position = tiles.past + tiles.start - tiles.row_start
    query_position = jnp.where(lanes < tiles.num_queries[:, None], first_position[:, None] + lanes, -1)
    query_position = jnp.tile(query_position, (1, max(group, 2 // tile_size)))[:, None, :, None]
    key_end = (first_position + tiles.num_queries)[:, None]
    first_tile, num_key_tiles = jnp.zeros(1, jnp.int32), tiles.num_key_tiles
    if window is not None:
        first_tile, num_key_tiles = windowed_key_tiles(tiles, window, KEY_TILE)

    def walk(nth: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, output = carry
        position = (first_tile[:, None] + nth) * KEY_TILE + jnp.arange(KEY_TILE)
        (keys, values), hole = _read_tile(
            position, staged, pages, block_table, tiles, tile_size, ring, scales
        )
        # Slots that nothing has written may hold NaN: they are selected away, not multiplied by zero.
        written = (position < key_end) & ~hole
        if window is not None:
            written &= position > first_position[:, None] - window
        # A column of ones makes the product sum the weights too: XLA orders a plain sum by the size of the array.
        ones = jnp.ones((*values.shape[:-1], 1))
        summed = jnp.concatenate([jnp.where(written[:, None, :, None], values, 0.0), ones], axis=-1)

        scores = jnp.einsum("tkqd,tksd->tkqs", picked, keys, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        key_position = position[:, None, None, :]
        seen = (key_position <= query_position) & ~hole[:, None, None, :]
        if window is not None:
            seen &= key_position > query_position - window
        scores = jnp.where(seen, scores, -jnp.inf)
        best_now = jnp.maximum(best, scores.max(axis=-1, keepdims=True))
        finite = jnp.where(jnp.isneginf(best_now), 0.0, best_now)
        weights = jnp.exp(scores - finite)
        product = _sum_values(weights, summed)
        return best_now, output * jnp.exp(best - finite) + product

    shape = (num_tiles, num_kv_heads, queries)
    best, output = jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, head_dim + 1))
    if sinks is not None:
        # A sink is a key that comes before all others: it sets the maximum and weighs one, with a value of zero.
        of_query = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), tile_size, axis=1)
        of_query = jnp.pad(of_query, ((0, 0), (0, queries - group * tile_size)))
        best = jnp.broadcast_to(of_query[:, :, None], best.shape)
        output = output.at[..., -1].set(1.0)
    _, output = jax.lax.fori_loop(0, num_key_tiles, walk, (best, output))
    total = output[..., -1:]
    output = (output[..., :-1] / jnp.where(total == 0.0, 1.0, total))[:, :, : group * tile_size]
    output = output.reshape(num_tiles, num_kv_heads, group, tile_size, head_dim).transpose(0, 3, 1, 2, 4)
    return output.reshape(num_tiles * tile_size, num_heads, head_dim)[tiles.lane].astype(query.dtype)


def _sum_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """float32[tiles, kv_heads, queries, n]: weights[..., queries, KEY_TILE] times values[..., KEY_TILE, n]."""
    pieces = -(-weights.shape[2] // _MAX_PRODUCT_ROWS)
    products = [
        jnp.einsum("tkqs,tksd->tkqd", part, values, preferred_element_type=jnp.float32)
        for part in jnp.array_split(weights, pieces, axis=2)
    ]
    return jnp.concatenate(products, axis=2)


def _read_tile(
    position: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    tiles: QueryTiles,
    tile_size: int,
    ring: int | None,
    scales: tuple[jax.Array, jax.Array] | None,
) -> tuple[list[jax.Array], jax.Array]:
    """Reads key tiles at `position`, int32[tiles or 1, KEY_TILE].

    Returns:
        Keys and values float32[tiles, kv_heads, KEY_TILE, head_dim], and bool[tiles, KEY_TILE] holes.
    """
    num_blocks, _, num_kv_heads, block_size, _ = pages.shape
    past, place = jnp.asarray(tiles.past)[:, None], jnp.asarray(tiles.place)[:, None]
    committed = position < past
    if ring is None:
        column = jnp.minimum(position // block_size, block_table.shape[1] - 1)
        block = block_table[place, column]
        hole = committed & ((block < 0) | (block >= num_blocks))
    else:
        block = place * ring + position // block_size % ring
        hole = position < past - ring * block_size
    block = jnp.clip(block, 0, num_blocks - 1)
    # One row a head, slot and kind, so that the gather itself brings heads in front of positions.
    head = (jnp.arange(num_kv_heads) * block_size)[:, None]
    key_row = (block * 2 * num_kv_heads * block_size + position % block_size)[:, None, :] + head
    index = jnp.clip(position - past + tiles.row_start[:, None], 0, staged.shape[0] - 1)
    index = (index * 2 * num_kv_heads)[:, None, :] + jnp.arange(num_kv_heads)[:, None]

    def read(fresh: jax.Array, held: jax.Array, kind: int) -> jax.Array:
        """float32[tiles, kv_heads, KEY_TILE, n] of fresh[.., n] and held[.., n]."""
        rows = held.reshape(-1, held.shape[-1])
        taken = rows.at[key_row + kind * num_kv_heads * block_size].get(mode="promise_in_bounds")
        if tile_size == 1:
            merged = fresh[tiles.start][:, kind, :, None, :]
        else:
            fresh_rows = fresh.reshape(-1, fresh.shape[-1])
            merged = fresh_rows.at[index + kind * num_kv_heads].get(mode="promise_in_bounds")
        return jnp.where(committed[:, None, :, None], taken, merged).astype(jnp.float32)

    read_rows = [read(staged, pages, kind) for kind in (0, 1)]
    if scales is not None:
        # A row of one element each.
        of_staged, of_pages = (part[..., None] for part in scales)
        read_rows = [rows * read(of_staged, of_pages, kind) for kind, rows in enumerate(read_rows)]
    return read_rows, hole
