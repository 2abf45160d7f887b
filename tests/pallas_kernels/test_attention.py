"""Paged attention against plain float64 attention, and its promise that a query's bits depend on its own row only."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import KEY_TILE
from tests.pallas_kernels.ragged import (
    Geometry,
    Row,
    Shape,
    attend,
    from_pages,
    lay_out,
    random_sequence,
    reference,
    to_pages,
)

GEOMETRIES = (
    Geometry(1, 1, 16, 16),
    Geometry(6, 2, 16, 5),
    Geometry(16, 1, 64, 32),
    Geometry(14, 2, 64, 16),
    Geometry(6, 2, 128, 7),
    Geometry(3, 3, 80, 1),
    Geometry(2, 1, 80, 300),
    Geometry(4, 2, 16, 256, "float16"),
)
LONGEST = 600
"""With the engine's tiles of 1 and 16 queries always; tiles of 2, which tests of holes have, in thorough runs."""
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
seeds = st.integers(0, 2**32 - 1)


def shape_for(geometry: Geometry, tokens: int, tile_size: int, rows: int = 4) -> Shape:
    columns = -(-LONGEST // geometry.block_size)
    return Shape(tokens, tile_size, rows=rows, columns=columns, num_blocks=rows * columns + 3)


@st.composite
def ragged_rows(draw, tokens: int, most: int = 4):
    """One to `most` rows with at most `tokens` new tokens together; one each if the two numbers are equal."""
    past = st.one_of(
        st.integers(0, 8),
        st.integers(0, LONGEST - tokens),
        st.sampled_from((KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 4 * KEY_TILE)),
    )
    rows, left = [], tokens
    for _ in range(draw(st.integers(1, most))):
        if left:
            rows.append(Row(draw(past), 1 if tokens == most else draw(st.integers(1, left))))
            left -= rows[-1].count
    return rows


@each_geometry
@pytest.mark.parametrize(
    ("tile_size", "tokens"), [(1, 4), pytest.param(2, 40, marks=pytest.mark.thorough), (16, 40)]
)
@settings(max_examples=4)
@given(seed=seeds, data=st.data())
def test_R4_attention_equals_plain_float64_attention(geometry, tile_size, tokens, seed, data):
    rng = np.random.default_rng(seed)
    rows = data.draw(ragged_rows(tokens))
    sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
    got = attend(lay_out(rng, geometry, sequences, rows, shape_for(geometry, tokens, tile_size)))
    tolerance = 1e-5 if geometry.dtype == "float32" else 4e-3
    for sequence, row, output in zip(sequences, rows, got, strict=True):
        np.testing.assert_allclose(
            output, reference(sequence, row, geometry.scale), atol=tolerance, rtol=tolerance
        )
        assert output.dtype == geometry.dtype


@each_geometry
@settings(max_examples=3)
@given(rows=ragged_rows(40), seed=seeds)
def test_case_C1_what_no_row_may_read_changes_no_bit(geometry, rows, seed):
    """NaN, infinity or zero in block 0, the last block, free blocks, unwritten slots and padding: the same bits."""
    make = np.random.default_rng(seed)
    sequences = [random_sequence(make, geometry, row.past + row.count) for row in rows]
    shape = shape_for(geometry, 40, 16)
    outputs = [
        attend(lay_out(np.random.default_rng(seed), geometry, sequences, rows, shape, fill=fill))
        for fill in (0.0, np.nan, np.inf, 12345.0)
    ]
    for other in outputs[1:]:
        for expected, got in zip(outputs[0], other, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("entries", [(2, -1, 99), (2, 3, -1), (2, -(2**31), 2**31 - 1)])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 777.0])
def test_case_C1_holes_behind_the_committed_slots_are_not_read(entries, poison):
    """Two requests in a pool of 3 blocks of 4, the second one's table padded with ids that are no blocks."""
    geometry = Geometry(2, 1, 16, 4)
    rng = np.random.default_rng(1)
    sequences = [random_sequence(rng, geometry, 7), random_sequence(rng, geometry, 5)]
    rows = [Row(6, 1), Row(4, 1)]
    shape = Shape(tokens=2, tile_size=2, rows=2, columns=3, num_blocks=3)
    roomy = dataclasses.replace(shape, num_blocks=6)
    base = lay_out(rng, geometry, sequences, rows, roomy, fill=poison)
    places = base.tiles.place[:2]
    slots, known = np.full((3, 4, 2, 1, 16), poison, np.float32), from_pages(base.pages)
    slots[:2] = known[base.block_table[places[0], :2]]
    slots[2] = known[base.block_table[places[1], 0]]
    pages = to_pages(slots)
    table = np.full((2, 3), -1, np.int32)
    table[places[0], :2], table[places[1]] = (0, 1), entries
    before = pages.copy()
    got = attend(dataclasses.replace(base, pages=pages, block_table=table, shape=shape))
    np.testing.assert_array_equal(pages, before)
    for sequence, row, output in zip(sequences, rows, got, strict=True):
        np.testing.assert_allclose(output, reference(sequence, row, geometry.scale), atol=1e-5)


@settings(max_examples=12)
@given(seed=seeds, past=st.integers(1, 80), holes=st.sets(st.integers(0, 19), min_size=1))
def test_case_C1_a_hole_among_the_committed_slots_hides_their_keys(seed, past, holes):
    geometry = Geometry(6, 2, 16, 4)
    rng = np.random.default_rng(seed)
    sequence, row = random_sequence(rng, geometry, past + 3), Row(past, 3)
    shape = Shape(tokens=8, tile_size=2, rows=2, columns=40, num_blocks=50)
    step = lay_out(rng, geometry, [sequence], [row], shape)
    table = step.block_table.copy()
    for column in holes:
        table[step.tiles.place[0], column] = rng.choice((-1, 50, 99, 2**31 - 1))
    dead = frozenset(p for p in range(past) if p // 4 in holes)
    (got,) = attend(dataclasses.replace(step, block_table=table))
    np.testing.assert_allclose(got, reference(sequence, row, geometry.scale, dead), atol=1e-5)


@each_geometry
def test_E6_a_query_gives_the_same_bits_in_every_step(geometry, thorough):
    """Any chunk cut, company, place, order of blocks, padding, tile and block size: the one-chunk bits."""
    rng = np.random.default_rng(7)
    lengths = (LONGEST, 2 * KEY_TILE + 5, 41, 5)
    sequences = [random_sequence(rng, geometry, length) for length in lengths]
    alone = [
        attend(
            lay_out(rng, geometry, [sequence], [Row(0, len(sequence.key))], shape_for(geometry, LONGEST, 16))
        )[0]
        for sequence in sequences
    ]
    compared = 0
    for tokens, tile_size, block_size in (
        (2, 1, geometry.block_size),
        (8, 1, 11),
        *([(4, 2, geometry.block_size)] if thorough else []),
        (16, 16, geometry.block_size),
        (128, 16, 11),
    ):
        layout = dataclasses.replace(geometry, block_size=block_size)
        shape = shape_for(layout, tokens, tile_size)
        for _ in range(6):
            chosen = rng.permutation(4)[: rng.integers(1, min(tokens, 4) + 1)].tolist()
            rows = []
            for i in chosen:
                most = 1 if tile_size == 1 else min(tokens // len(chosen), lengths[i])
                count = int(rng.integers(1, most + 1))
                rows.append(Row(int(rng.integers(0, lengths[i] - count + 1)), count))
            step = lay_out(rng, layout, [sequences[i] for i in chosen], rows, shape)
            for i, row, got in zip(chosen, rows, attend(step), strict=True):
                different = np.flatnonzero((got != alone[i][row.past :][: row.count]).any(axis=(1, 2)))
                assert not len(different), (
                    f"positions {row.past + different} of {row} in {rows}, {shape}, {layout}"
                )
                compared += row.count
    assert compared > 200
