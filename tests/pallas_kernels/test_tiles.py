"""Query tiles against a plain loop over the tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import make_query_tiles, max_query_tiles

row_lists = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 70)), min_size=1, max_size=9)


@given(
    rows=row_lists,
    tile_size=st.sampled_from((1, 2, 3, 8, 16)),
    key_tile=st.sampled_from((64, 256)),
    spare=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_R4_query_tiles_equal_a_plain_loop(rows, tile_size, key_tile, spare, seed):
    places = np.random.default_rng(seed).permutation(20)[: len(rows)].astype(np.int32)
    if tile_size == 1:
        rows = [(row_past, 1) for row_past, _ in rows]
    past, counts = np.array(rows, np.int64).T
    tokens = int(counts.sum())
    room = max_query_tiles(tokens, len(rows), tile_size) + spare
    tiles = make_query_tiles(
        places,
        past,
        counts,
        tile_size=tile_size,
        key_tile=key_tile,
        padded_tiles=room,
        padded_tokens=tokens + spare,
    )
    expected, lanes, start = [], [], 0
    for place, (row_past, count) in zip(places, rows, strict=True):
        for first in range(0, count, tile_size):
            held = min(tile_size, count - first)
            lanes += [len(expected) * tile_size + i for i in range(held)]
            expected.append((place, row_past, start, start + first, held))
        start += count
    assert len(expected) <= room - spare
    columns = (tiles.place, tiles.past, tiles.row_start, tiles.start, tiles.num_queries)
    assert list(zip(*(column[: len(expected)].tolist() for column in columns), strict=True)) == expected
    assert not tiles.num_queries[len(expected) :].any()
    assert tiles.lane.tolist() == lanes + [0] * spare
    assert int(tiles.num_key_tiles) == max(-(-(p + n) // key_tile) for p, n in rows)
    assert all(np.asarray(field).dtype == np.int32 for field in tiles)


@given(rows=row_lists, tile_size=st.integers(1, 20))
def test_max_query_tiles_is_enough_for_every_cut(rows, tile_size):
    counts = [count for _, count in rows]
    assert sum(-(-count // tile_size) for count in counts) <= max_query_tiles(
        sum(counts), len(counts), tile_size
    )


def test_tiles_of_one_query_refuse_longer_rows():
    with pytest.raises(ValueError, match="3 tokens"):
        make_query_tiles(
            np.arange(2),
            np.zeros(2, int),
            np.array([1, 3]),
            tile_size=1,
            key_tile=64,
            padded_tiles=9,
            padded_tokens=9,
        )
