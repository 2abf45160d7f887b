"""Rings in paged attention: few slots a place, the bits of a whole table, and what a slot held before never seen."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import KEY_TILE, make_query_tiles
from tests.pallas_kernels.ragged import (
    Extras,
    Geometry,
    Row,
    Sequence,
    Shape,
    Step,
    attend,
    lay_out,
    random_sequence,
    reference,
    to_pages,
)

LONGEST, ROWS, CHUNK, WIDEST = 400, 3, 16, 150
SINKS = (-30.0, -1.0, 0.0, 0.5, 3.0, 30.0)
seeds = st.integers(0, 2**32 - 1)


def ring_for(chunk: int, window: int, size: int) -> int:
    """J1."""
    return -(-(chunk + window - 1) // size)


@st.composite
def rings(draw, decode: bool):
    """A chunk size, a window and one to three rows of at most a chunk each; pasts around wraps and key tiles."""
    chunk = 1 if decode else draw(st.integers(1, CHUNK))
    window = draw(st.integers(1, WIDEST))
    past = st.one_of(
        st.integers(0, 20),
        st.integers(0, LONGEST - CHUNK),
        st.integers(-2, 2).map(lambda n: KEY_TILE + n),
        st.integers(-2, 2).map(lambda n: max(0, window + chunk + n)),
        st.integers(-2, 2).map(lambda n: max(0, window + n)),
    )
    count = st.integers(1, chunk)
    return chunk, window, [Row(draw(past), draw(count)) for _ in range(draw(st.integers(1, ROWS)))]


@pytest.mark.parametrize(("size", "decode"), [(1, False), (3, False), (16, False), (5, True)])
@settings(max_examples=25)
@given(data=st.data(), seed=seeds, sinks=st.sampled_from((None, SINKS)))
def test_J1_J5_E6_a_ring_gives_the_bits_of_the_whole_cache(size, decode, data, seed, sinks):
    """For any W, C and B, with poison in every slot that no row may read; the whole cache is tested against NumPy."""
    chunk, window, rows = data.draw(rings(decode))
    geometry = Geometry(6, 2, 16, size)
    columns = -(-LONGEST // size)
    tokens = ROWS if decode else ROWS * CHUNK
    shape = Shape(tokens, 1 if decode else 16, rows=ROWS, columns=columns, num_blocks=ROWS * columns + 2)
    make = np.random.default_rng(seed)
    sequences = [random_sequence(make, geometry, row.past + row.count) for row in rows]
    whole, ringed = (
        attend(
            lay_out(
                np.random.default_rng(seed),
                geometry,
                sequences,
                rows,
                shape,
                fill=fill,
                extras=Extras(window, sinks=sinks, ring=ring),
            )
        )
        for ring, fill in ((None, 0.0), (ring_for(chunk, window, size), np.nan))
    )
    for expected, got in zip(whole, ringed, strict=True):
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=25)
@given(past=st.integers(0, 60), count=st.integers(1, 5), ring=st.integers(1, 4), seed=seeds)
def test_J1_a_ring_without_a_window_holds_its_newest_keys_and_no_others(past, count, ring, seed):
    """The kernel hides by itself what was written over; that no query needs it is the engine's part."""
    geometry, row = Geometry(6, 2, 16, 4), Row(past, count)
    rng = np.random.default_rng(seed)
    sequence = random_sequence(rng, geometry, past + count)
    shape = Shape(tokens=8, tile_size=16, rows=2, columns=1, num_blocks=8)
    gone = frozenset(range(past - 4 * ring))
    (got,) = attend(lay_out(rng, geometry, [sequence], [row], shape, extras=Extras(ring=ring)))
    np.testing.assert_allclose(got, reference(sequence, row, geometry.scale, gone), atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 32])
@pytest.mark.parametrize("chunk", [1, 3])
def test_J5_E8_case_C5_every_query_sees_exactly_its_window_across_wraps(window, chunk):
    """A ring filled step by step, as an engine does; values are one-hot, so the output's support is what was seen.

    The pages hold poison at first and what was written over later; a step starts only when the last one has been
    written. The prompt ends around window, chunk and ring in turn, and is decoded from there.
    """
    size, dim = 4, 64
    ring = ring_for(chunk, window, size)
    slots = np.full((2 * ring, size, 2, 1, dim), np.nan, np.float32)
    geometry = Geometry(1, 1, dim, size)
    for prompt in sorted({max(1, n + off) for n in (window, chunk, ring * size) for off in (-1, 0, 1)}):
        length = min(prompt + 2 * ring * size + 3, dim)
        drawn = random_sequence(np.random.default_rng(prompt), geometry, length)
        value = np.eye(length, dim, dtype=np.float32)[:, None]
        past = 0
        while past < length:
            count = min(chunk, prompt - past) if past < prompt else 1
            step = ring_step(Sequence(drawn.query, drawn.key, value), Row(past, count), slots, ring, window)
            (seen,) = attend(step)
            for position, output in enumerate(seen[:, 0], past):
                expected = list(range(max(0, position - window + 1), position + 1))
                assert np.flatnonzero(output).tolist() == expected
            now = np.arange(past, past + count)
            kv = np.stack([drawn.key, value], axis=1)
            slots[ring + now // size % ring, now % size] = kv[now]
            past += count


def ring_step(sequence: Sequence, row: Row, slots: np.ndarray, ring: int, window: int) -> Step:
    """One row of a request in place 1 of two, whose ring is in `slots`."""
    shape = Shape(tokens=4, tile_size=16, rows=2, columns=1, num_blocks=len(slots))
    own = slice(row.past, row.past + row.count)
    staged = np.full((4, 2, 1, slots.shape[-1]), np.nan, np.float32)
    query = np.full((4, 1, slots.shape[-1]), np.nan, np.float32)
    staged[: row.count, 0], staged[: row.count, 1] = sequence.key[own], sequence.value[own]
    query[: row.count] = sequence.query[own]
    tiles = make_query_tiles(
        np.array([1], np.int32),
        np.array([row.past]),
        np.array([row.count]),
        tile_size=16,
        key_tile=KEY_TILE,
        padded_tiles=shape.tiles,
        padded_tokens=4,
    )
    table = np.full((2, 1), -1, np.int32)
    extras = Extras(window, ring=ring)
    return Step(query, staged, to_pages(slots), table, tiles, shape, 0.1, (slice(0, row.count),), extras)
