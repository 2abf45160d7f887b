"""Windows, soft caps and sinks of paged attention, against plain float64 attention and the walk without them."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import KEY_TILE, make_query_tiles
from pallas_kernels.tiles import windowed_key_tiles
from tests.pallas_kernels.ragged import (
    Extras,
    Geometry,
    Row,
    Sequence,
    Shape,
    attend,
    lay_out,
    random_sequence,
    reference,
)

WINDOWS = (1, 3, 4, 5, 32)
GEOMETRY = Geometry(6, 2, 16, 5)
SHAPE = Shape(tokens=16, tile_size=16, rows=3, columns=80, num_blocks=243)
LONGEST = 400
SINKS = (-30.0, -1.0, 0.0, 0.5, 3.0, 30.0)
EXTRAS = (
    Extras(window=4),
    Extras(window=150),
    Extras(softcap=2.0),
    Extras(sinks=SINKS),
    Extras(window=32, softcap=2.0, sinks=SINKS),
)
each_extras = pytest.mark.parametrize("extras", EXTRAS, ids=str)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def ragged_rows(draw):
    """One to three rows with at most 16 new tokens together; pasts around windows and around key tiles."""
    past = st.one_of(
        st.integers(0, 40),
        st.integers(0, LONGEST - 16),
        st.sampled_from((KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE, 2 * KEY_TILE + 31)),
    )
    rows, left = [], SHAPE.tokens
    for _ in range(draw(st.integers(1, 3))):
        if left:
            rows.append(Row(draw(past), draw(st.integers(1, left))))
            left -= rows[-1].count
    return rows


@each_extras
@pytest.mark.parametrize("geometry", [GEOMETRY, Geometry(6, 6, 16, 16, "float16")], ids=str)
@settings(max_examples=8)
@given(rows=ragged_rows(), seed=seeds)
def test_J5_R4_equal_plain_float64_attention(geometry, extras, rows, seed):
    """Poison lies in every slot before a row's window, so reading one there shows (sibling of case C1)."""
    rng = np.random.default_rng(seed)
    sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
    got = attend(lay_out(rng, geometry, sequences, rows, SHAPE, extras=extras))
    tolerance = 1e-5 if geometry.dtype == "float32" else 4e-3
    for sequence, row, output in zip(sequences, rows, got, strict=True):
        expected = reference(sequence, row, geometry.scale, extras=extras)
        np.testing.assert_allclose(output, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile_size", [1, 2, 16])
def test_case_C5_a_window_includes_the_query_itself(window, tile_size):
    """Values are one-hot by position, so the output's support is what the query saw: prefill, chunks and decode."""
    geometry = Geometry(1, 1, 64, 5)
    length = window + 20
    rng = np.random.default_rng(window)
    drawn = random_sequence(rng, geometry, length)
    sequence = Sequence(drawn.query, drawn.key, np.eye(length, 64, dtype=np.float32)[:, None])
    most = min(tile_size, 3)
    steps = [Row(start, min(most, length - start)) for start in range(0, length, most)]
    if tile_size == 16:
        steps.append(Row(0, length))
    for row in steps:
        shape = dataclasses.replace(SHAPE, tokens=64 if tile_size == 16 else 2 * most, tile_size=tile_size)
        (got,) = attend(lay_out(rng, geometry, [sequence], [row], shape, extras=Extras(window=window)))
        for i, output in enumerate(got[:, 0]):
            position = row.past + i
            expected = list(range(max(0, position - window + 1), position + 1))
            assert np.flatnonzero(output).tolist() == expected


@pytest.mark.parametrize("window", [1, 32, 150])
@pytest.mark.parametrize("decode", [False, True], ids=["chunks", "decode"])
def test_E6_case_C5_chunked_equals_whole_and_packed_equals_alone(window, decode):
    """Bit for bit, with every extra on: the walk starts at another key tile in each of these steps."""
    extras = Extras(window=window, softcap=5.0, sinks=SINKS)
    rng = np.random.default_rng(window)
    lengths = (LONGEST, 2 * KEY_TILE + 5, 41)
    sequences = [random_sequence(rng, GEOMETRY, length) for length in lengths]
    big = dataclasses.replace(SHAPE, tokens=LONGEST)
    whole = [
        attend(lay_out(rng, GEOMETRY, [s], [Row(0, len(s.key))], big, extras=extras))[0] for s in sequences
    ]
    shape = dataclasses.replace(SHAPE, tokens=4, tile_size=1) if decode else SHAPE
    for _ in range(12):
        chosen = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        most = 1 if decode else SHAPE.tokens // len(chosen)
        counts = [int(rng.integers(1, most + 1)) for _ in chosen]
        rows = [Row(int(rng.integers(0, lengths[i] - n + 1)), n) for i, n in zip(chosen, counts, strict=True)]
        got = attend(lay_out(rng, GEOMETRY, [sequences[i] for i in chosen], rows, shape, extras=extras))
        for i, row, output in zip(chosen, rows, got, strict=True):
            np.testing.assert_array_equal(output, whole[i][row.past :][: row.count], err_msg=f"{row}")


@settings(max_examples=15)
@given(rows=ragged_rows(), seed=seeds, sinks=st.sampled_from((None, SINKS)))
def test_J5_case_C5_a_window_that_holds_the_sequence_changes_no_bit(rows, seed, sinks):
    """W at or above every length, up to the largest int32, equals no window."""
    make = np.random.default_rng(seed)
    sequences = [random_sequence(make, GEOMETRY, row.past + row.count) for row in rows]
    outputs = [
        attend(
            lay_out(
                np.random.default_rng(seed),
                GEOMETRY,
                sequences,
                rows,
                SHAPE,
                extras=Extras(window=window, sinks=sinks),
            )
        )
        for window in (None, LONGEST, 2**31 - 1)
    ]
    for other in outputs[1:]:
        for expected, got in zip(outputs[0], other, strict=True):
            np.testing.assert_array_equal(got, expected)


@settings(max_examples=50)
@given(rows=ragged_rows(), window=st.integers(1, 2**31 - 1) | st.integers(1, 500))
def test_J5_each_walk_begins_at_the_first_key_tile_that_its_row_needs(rows, window):
    """A windowed layer does not pay for the context before its windows, whatever the other rows' positions are."""
    past, count = (np.array([getattr(row, name) for row in rows]) for name in ("past", "count"))
    tiles = make_query_tiles(
        np.arange(len(rows), dtype=np.int32),
        past,
        count,
        tile_size=SHAPE.tile_size,
        key_tile=KEY_TILE,
        padded_tiles=SHAPE.tiles,
        padded_tokens=SHAPE.tokens,
    )
    seen = [
        {
            key // KEY_TILE
            for position in range(row.past, row.past + row.count)
            for key in (max(0, position - window + 1), position)
        }
        for row in rows
    ]
    first, most = windowed_key_tiles(tiles, window, KEY_TILE)
    # No row has more queries than a tile, so there is a tile a row.
    assert first[: len(rows)].tolist() == [min(keys) for keys in seen]
    assert most == max(max(keys) + 1 - min(keys) for keys in seen)
