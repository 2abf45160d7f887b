"""The attention kernel, interpreted with race detection, against plain float64 attention."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import backends, best_tile_size, paged_attention
from tests.pallas_kernels.ragged import (
    PLAIN,
    Extras,
    Geometry,
    Row,
    Shape,
    Step,
    from_pages,
    lay_out,
    random_sequence,
    reference,
    to_pages,
)

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel interpreter of JAX 0.10 takes minutes for one kernel"
)

LONGEST = 200
DECODE, PREFILL = 1, 8
# name: heads and blocks, what the layer asks, tile size, whether the split is fixed
CASES = {
    "decode": (Geometry(4, 2, 64, 16), PLAIN, DECODE, False),
    "decode, fixed split": (Geometry(2, 2, 64, 8), PLAIN, DECODE, True),
    "decode, groups of 7": (Geometry(7, 1, 80, 32), PLAIN, DECODE, False),
    "prefill": (Geometry(6, 2, 64, 16), PLAIN, PREFILL, False),
    "prefill by two warpgroups": (Geometry(16, 1, 64, 64), PLAIN, PREFILL, False),
    "bfloat16": (Geometry(2, 1, 96, 16, "bfloat16"), PLAIN, PREFILL, False),
    "float16": (Geometry(3, 1, 128, 128, "float16"), PLAIN, DECODE, False),
    "wide heads": (Geometry(2, 1, 256, 16), PLAIN, PREFILL, False),
    "window": (Geometry(4, 2, 64, 16), Extras(window=70), PREFILL, False),
    "ring": (Geometry(4, 2, 64, 16), Extras(window=30, ring=4), DECODE, False),
    "cap and sinks": (
        Geometry(4, 2, 64, 16),
        Extras(softcap=3.0, sinks=(0.5, -2.0, 4.0, 0.0)),
        PREFILL,
        False,
    ),
}
each_case = pytest.mark.parametrize("case", CASES)
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def program(geometry: Geometry, extras: Extras, tile_size: int, batch_invariant: bool):
    return jax.jit(
        functools.partial(
            paged_attention,
            tile_size=tile_size,
            scale=geometry.scale,
            window=extras.window,
            softcap=extras.softcap,
            ring=extras.ring,
            backend="interpret",
            batch_invariant=batch_invariant,
        )
    )


def attend(step: Step, geometry: Geometry, extras: Extras, batch_invariant: bool = False) -> list[np.ndarray]:
    run = program(geometry, extras, step.shape.tile_size, batch_invariant)
    sinks = None if extras.sinks is None else np.array(extras.sinks, np.float32)
    arguments = (step.query, step.staged, step.pages, step.block_table, step.tiles)
    out = np.array(run(*arguments, sinks=sinks, scales=step.scales))
    return [out[span] for span in step.spans]


def shape_for(geometry: Geometry, tile_size: int) -> Shape:
    columns = -(-LONGEST // geometry.block_size)
    return Shape(3 if tile_size == DECODE else 20, tile_size, 3, columns, 3 * columns + 3)


def tolerance(geometry: Geometry, sequences) -> float:
    """Weights are rounded once before they meet the values, and the result once: two unit roundoffs of the values."""
    roundoff = {"float32": 4e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[geometry.dtype]
    return 2 * roundoff * max(float(abs(s.value.astype(np.float64)).max()) for s in sequences) + 1e-6


@st.composite
def ragged(draw, tile_size: int):
    count = st.just(1) if tile_size == DECODE else st.integers(1, 10)
    past = st.one_of(
        st.integers(0, 9), st.sampled_from((63, 64, 65, 127, 128, 129)), st.integers(0, LONGEST - 10)
    )
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 3))):
        left = (3 if tile_size == DECODE else 20) - sum(row.count for row in rows)
        if left:
            rows.append(Row(draw(past), min(draw(count), left)))
    return rows


@interpreted
@each_case
@settings(max_examples=4)
@given(data=st.data(), seed=seeds)
def test_R1_R2_R4_kernel_equals_plain_float64_attention(case, data, seed):
    geometry, extras, tile_size, fixed = CASES[case]
    rng = np.random.default_rng(seed)
    rows = data.draw(ragged(tile_size))
    sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
    step = lay_out(rng, geometry, sequences, rows, shape_for(geometry, tile_size), extras=extras)
    most = tolerance(geometry, sequences)
    for sequence, row, got in zip(sequences, rows, attend(step, geometry, extras, fixed), strict=True):
        expected = reference(sequence, row, geometry.scale, extras=extras)
        np.testing.assert_allclose(got.astype(np.float64), expected, atol=most, rtol=0)


@interpreted
@pytest.mark.parametrize("case", ["decode", "prefill", "window", "ring"])
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
def test_R1_what_lies_outside_live_slots_changes_no_bit(case, data, seed):
    geometry, extras, tile_size, fixed = CASES[case]
    rows = data.draw(ragged(tile_size))
    outputs = []
    for fill in (np.nan, 0.0):
        rng = np.random.default_rng(seed)
        sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
        step = lay_out(rng, geometry, sequences, rows, shape_for(geometry, tile_size), fill, extras)
        outputs.append(attend(step, geometry, extras, fixed))
    for poisoned, clean in zip(*outputs, strict=True):
        np.testing.assert_array_equal(poisoned, clean)


@interpreted
@settings(max_examples=4)
@given(data=st.data(), seed=seeds)
def test_C1_a_hole_among_committed_keys_is_never_read(data, seed):
    geometry, extras, tile_size, _ = CASES["prefill"]
    rng = np.random.default_rng(seed)
    row = Row(data.draw(st.integers(1, LONGEST - 20)), data.draw(st.integers(1, 9)))
    sequence = random_sequence(rng, geometry, row.past + row.count)
    step = lay_out(rng, geometry, [sequence], [row], shape_for(geometry, tile_size))
    size = geometry.block_size
    held = -(-row.past // size)
    lost = data.draw(st.sets(st.integers(0, held - 1), min_size=1))
    table, slots = step.block_table.copy(), from_pages(step.pages).copy()
    place = int(step.tiles.place[0])
    for column in lost:
        slots[table[place, column]] = np.nan
        table[place, column] = data.draw(st.sampled_from((-1, step.shape.num_blocks, 2**31 - 1)))
    step = dataclasses.replace(step, block_table=table, pages=to_pages(slots))
    dead = frozenset(p for c in lost for p in range(c * size, min((c + 1) * size, row.past)))
    (got,) = attend(step, geometry, extras)
    expected = reference(sequence, row, geometry.scale, dead)
    np.testing.assert_allclose(got, expected, atol=tolerance(geometry, [sequence]), rtol=0)


@interpreted
@settings(max_examples=4)
@given(data=st.data(), seed=seeds)
def test_R2_a_row_keeps_its_bits_in_any_company_in_the_invariant_mode(data, seed):
    geometry, extras, tile_size, fixed = CASES["decode, fixed split"]
    rng = np.random.default_rng(seed)
    rows = data.draw(ragged(tile_size))
    sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
    shape = shape_for(geometry, tile_size)
    together = attend(lay_out(rng, geometry, sequences, rows, shape), geometry, extras, fixed)
    for sequence, row, expected in zip(sequences, rows, together, strict=True):
        alone = lay_out(rng, geometry, [sequence], [row], dataclasses.replace(shape, tokens=1))
        np.testing.assert_array_equal(attend(alone, geometry, extras, fixed)[0], expected)


@interpreted
@settings(max_examples=3)
@given(past=st.integers(0, LONGEST - 10), other=st.integers(0, LONGEST - 10), seed=seeds)
def test_R2_a_decode_row_keeps_its_bits_beside_a_prompt_in_the_invariant_mode(past, other, seed):
    geometry, extras, tile_size, _ = CASES["prefill by two warpgroups"]
    rng = np.random.default_rng(seed)
    rows = [Row(past, 1), Row(other, 9)]
    sequences = [random_sequence(rng, geometry, row.past + row.count) for row in rows]
    step = lay_out(rng, geometry, sequences, rows, shape_for(geometry, tile_size))
    mixed = attend(step, geometry, extras, batch_invariant=True)[0]
    alone = lay_out(rng, geometry, sequences[:1], rows[:1], shape_for(geometry, DECODE))
    np.testing.assert_array_equal(attend(alone, geometry, extras, batch_invariant=True)[0], mixed)


@interpreted
def test_C25_scores_beyond_float16_stay_finite():
    geometry, rng = Geometry(2, 1, 256, 16, "float16"), np.random.default_rng(0)
    row, shape = Row(90, 1), Shape(1, DECODE, 1, 8, 12)
    sequence = random_sequence(rng, geometry, 91)
    loud = dataclasses.replace(sequence, query=sequence.query * 64, key=sequence.key * 64)
    assert abs(loud.query[-1, 0].astype(np.float64) @ loud.key[:, 0].astype(np.float64).T).max() > 65_504
    (got,) = attend(lay_out(rng, geometry, [loud], [row], shape), geometry, PLAIN)
    expected = reference(loud, row, geometry.scale)
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=tolerance(geometry, [loud]), rtol=0)


REFUSED = {
    "heads": (
        Geometry(2, 1, 512, 16, "bfloat16"),
        DECODE,
        "heads in steps of 16 elements up to 256, not 512",
    ),
    "odd heads": (Geometry(2, 1, 72, 16, "bfloat16"), DECODE, "not 72"),
    "block": (Geometry(2, 1, 64, 24, "bfloat16"), DECODE, "not 24"),
    "type": (Geometry(2, 1, 64, 16, "float32"), DECODE, "not float32"),
    "group": (
        Geometry(16, 1, 256, 16, "bfloat16"),
        PREFILL,
        "64 packed queries a tile, not 8 of 16 heads each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_R5_C22_what_the_kernel_refuses_warns_once_or_is_an_error(case, monkeypatch, recwarn):
    geometry, tile_size, reason = REFUSED[case]
    rng = np.random.default_rng(0)
    row, shape = Row(9, 1), Shape(1, tile_size, 1, 2, 4)
    sequence = random_sequence(rng, geometry, 10)
    step = lay_out(rng, geometry, [sequence], [row], shape)
    arguments = (step.query, step.staged, step.pages, step.block_table, step.tiles)
    options = {"tile_size": tile_size, "scale": geometry.scale}
    with pytest.raises(ValueError, match=reason) as error:
        paged_attention(*arguments, **options, backend="mosaic_gpu")
    assert "backend='xla'" in str(error.value)
    monkeypatch.setattr(backends, "compute_capability", lambda: "9.0")
    backends.warn_once.cache_clear()
    for _ in range(2):
        out = paged_attention(*arguments, **options)
    assert [str(warning.message) for warning in recwarn if reason in str(warning.message)] != []
    assert len(recwarn) == 1
    most = tolerance(geometry, [sequence])
    expected = reference(sequence, row, geometry.scale)
    np.testing.assert_allclose(np.array(out).astype(np.float64), expected, atol=most, rtol=0)


def test_R5_an_unknown_backend_is_named():
    step = lay_out(
        np.random.default_rng(0),
        Geometry(1, 1, 16, 16),
        [random_sequence(np.random.default_rng(0), Geometry(1, 1, 16, 16), 1)],
        [Row(0, 1)],
        Shape(1, 1, 1, 1, 3),
    )
    with pytest.raises(ValueError, match="no backend 'triton'; give 'mosaic_gpu'"):
        paged_attention(
            step.query,
            step.staged,
            step.pages,
            step.block_table,
            step.tiles,
            tile_size=1,
            scale=1.0,
            backend="triton",
        )


def pool_shape(num_blocks: int):
    half = np.dtype("float16")
    tiles = jax.tree.map(lambda _: jax.ShapeDtypeStruct((1,), np.int32), (0,) * 6)
    return (
        jax.ShapeDtypeStruct((1, 8, 128), half),
        jax.ShapeDtypeStruct((1, 2, 8, 128), half),
        jax.ShapeDtypeStruct((num_blocks, 2, 8, 16, 128), half),
        jax.ShapeDtypeStruct((1, 4), np.int32),
        tiles,
    )


def test_C24_a_pool_whose_rows_32_bits_cannot_count_is_refused():
    from pallas_kernels import QueryTiles

    def shaped(num_blocks: int):
        query, staged, pages, table, tiles = pool_shape(num_blocks)
        longest = jax.ShapeDtypeStruct((), np.int32)
        attention = functools.partial(paged_attention, tile_size=1, scale=1.0)
        return jax.eval_shape(attention, query, staged, pages, table, QueryTiles(*tiles, longest))

    assert shaped(2**23 - 1).shape == (1, 8, 128)
    with pytest.raises(ValueError, match=r"more than 2\^31 rows .* take fewer blocks"):
        shaped(2**23)


@pytest.mark.parametrize(
    ("heads", "head_dim", "best"), [((32, 8), 128, 32), ((8, 8), 64, 128), ((7, 1), 256, 9)]
)
def test_R1_a_tile_of_prefill_fills_its_packed_rows(heads, head_dim, best):
    assert best_tile_size(*heads, head_dim) == best
