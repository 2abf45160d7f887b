"""Query tiles: how a packed step of ragged rows is cut into equal pieces that attention can run as one batch.

A tile holds up to `tile_size` neighbouring queries of one row, so its row's keys are gathered once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class QueryTiles(NamedTuple):
    """Where each tile's queries and keys are; int32 throughout.

    Attributes:
        place: [tiles], row of the block table.
        past: [tiles], committed key slots of the tile's row.
        row_start: [tiles], packed index of the row's first token.
        start: [tiles], packed index of the tile's first query.
        num_queries: [tiles], queries that the tile holds; 0 for padding.
        lane: [tokens], tile * tile_size + place in the tile, of each packed token.
        num_key_tiles: [], key tiles that cover the longest row.
    """

    place: np.ndarray | jax.Array
    past: np.ndarray | jax.Array
    row_start: np.ndarray | jax.Array
    start: np.ndarray | jax.Array
    num_queries: np.ndarray | jax.Array
    lane: np.ndarray | jax.Array
    num_key_tiles: np.ndarray | jax.Array


def max_query_tiles(num_tokens: int, num_rows: int, tile_size: int) -> int:
    """Returns how many tiles `num_tokens` tokens in at most `num_rows` rows can need."""
    return min(-(-num_tokens // tile_size) + num_rows, num_tokens)


def make_query_tiles(
    places: np.ndarray,
    past: np.ndarray,
    num_tokens: np.ndarray,
    *,
    tile_size: int,
    key_tile: int,
    padded_tiles: int,
    padded_tokens: int,
) -> QueryTiles:
    """Cuts packed rows into tiles.

    Args:
        places: int32[rows], each row's place in the block table.
        past: int[rows], each row's committed key slots.
        num_tokens: int[rows], each row's tokens; the rows are packed one behind the other.
        tile_size: Most queries of a tile; 1 is for steps of one token a row.
        key_tile: Positions of a key tile.
        padded_tiles: Tiles of the result, at least as many as needed.
        padded_tokens: Tokens of the result, at least as many as the rows hold.

    Returns:
        The tiles; padding tiles hold no queries and padding tokens point at lane 0.

    Raises:
        ValueError: `tile_size` is 1 and a row has more than one token.
    """
    if tile_size == 1 and (num_tokens > 1).any():
        raise ValueError(f"a row has {int(num_tokens.max())} tokens in tiles of 1; use a larger tile_size")
    tiles_of_row = -(-num_tokens // tile_size)
    row = np.repeat(np.arange(len(places)), tiles_of_row)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of_row) - tiles_of_row, tiles_of_row)
    row_start = np.cumsum(num_tokens) - num_tokens

    token_row = np.repeat(np.arange(len(places)), num_tokens)
    local = np.arange(len(token_row)) - row_start[token_row]
    first_tile = np.cumsum(tiles_of_row) - tiles_of_row
    lane = (first_tile[token_row] + local // tile_size) * tile_size + local % tile_size

    def padded(values: np.ndarray, size: int) -> np.ndarray:
        out = np.zeros(size, np.int32)
        out[: len(values)] = values
        return out

    longest = int((past + num_tokens).max(initial=0))
    return QueryTiles(
        place=padded(places[row], padded_tiles),
        past=padded(past[row], padded_tiles),
        row_start=padded(row_start[row], padded_tiles),
        start=padded(row_start[row] + nth * tile_size, padded_tiles),
        num_queries=padded(np.minimum(num_tokens[row] - nth * tile_size, tile_size), padded_tiles),
        lane=padded(lane, padded_tokens),
        num_key_tiles=np.asarray(-(-longest // key_tile), np.int32),
    )


def windowed_key_tiles(tiles: QueryTiles, window: int, key_tile: int) -> tuple[jax.Array, jax.Array]:
    """Returns which tiles of `key_tile` positions hold keys that a query sees in its `window`.

    Returns:
        int32[tiles], the first one of each query tile, and int32[], how many at most from there on.
    """
    first_position = tiles.past + tiles.start - tiles.row_start
    first = jnp.maximum(first_position - window + 1, 0) // key_tile
    last = (first_position + tiles.num_queries - 1) // key_tile
    return first, jnp.where(tiles.num_queries > 0, last + 1 - first, 0).max()
