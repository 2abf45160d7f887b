"""Paged attention over codes of 8 bits and their scales, in XLA's form: it attends to float32(code) * scale."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import KEY_TILE, paged_attention
from pallas_kernels.quantisation import LARGEST_CODE
from tests.pallas_kernels.ragged import (
    PLAIN,
    Extras,
    Geometry,
    Row,
    Sequence,
    Shape,
    attend,
    lay_out,
    lay_out_codes,
    random_sequence,
    reference,
    uneven,
)

LONGEST = 300
CODES = tuple(map(str, LARGEST_CODE))
GEOMETRY = Geometry(4, 2, 64, 16)
each_code = pytest.mark.parametrize("code", CODES)
seeds = st.integers(0, 2**32 - 1)


def shape_for(tokens: int, tile_size: int) -> Shape:
    columns = -(-LONGEST // GEOMETRY.block_size)
    return Shape(tokens, tile_size, rows=3, columns=columns, num_blocks=3 * columns + 3)


def sequence_of(rng: np.random.Generator, length: int) -> Sequence:
    return uneven(rng, random_sequence(rng, GEOMETRY, length))


@each_code
@pytest.mark.parametrize("tile_size", [1, 16])
@pytest.mark.parametrize("extras", [PLAIN, Extras(window=30, ring=4)], ids=["plain", "ring"])
@settings(max_examples=3)
@given(seed=seeds, data=st.data())
def test_R1_R4_attention_over_codes_equals_float64_attention_over_what_they_stand_for(
    code, tile_size, extras, seed, data
):
    """Codes and scales of slots that hold nothing are NaN."""
    rng = np.random.default_rng(seed)
    past = st.one_of(st.integers(0, LONGEST - 8), st.sampled_from((KEY_TILE - 1, KEY_TILE, 2 * KEY_TILE + 1)))
    count = st.just(1) if tile_size == 1 else st.integers(1, 8)
    rows = [Row(data.draw(past), data.draw(count)) for _ in range(data.draw(st.integers(1, 3)))]
    sequences = [sequence_of(rng, row.past + row.count) for row in rows]
    shape = shape_for(3 if tile_size == 1 else 24, tile_size)
    step, meant = lay_out_codes(seed, GEOMETRY, code, sequences, rows, shape, extras)
    for sequence, row, got in zip(meant, rows, attend(step), strict=True):
        expected = reference(sequence, row, GEOMETRY.scale, extras=extras)
        np.testing.assert_allclose(got, expected, atol=1e-5 * max(1.0, abs(sequence.value).max()))


@each_code
def test_E6_a_query_over_codes_gives_the_same_bits_in_every_step(code):
    """Whole prompts, chunks and single tokens, alone and in company, committed or staged."""
    rng = np.random.default_rng(3)
    sequences = [sequence_of(rng, length) for length in (LONGEST, KEY_TILE + 3, 9)]
    alone = [
        attend(lay_out_codes(i, GEOMETRY, code, [one], [Row(0, len(one.key))], shape_for(LONGEST, 16))[0])[0]
        for i, one in enumerate(sequences)
    ]
    for tokens, tile_size in ((3, 1), (40, 16)):
        for seed in range(5):
            counts = [1 if tile_size == 1 else int(rng.integers(1, 10)) for _ in sequences]
            rows = [
                Row(int(rng.integers(0, len(one.key) - count + 1)), count)
                for one, count in zip(sequences, counts, strict=True)
            ]
            step, _ = lay_out_codes(seed, GEOMETRY, code, sequences, rows, shape_for(tokens, tile_size))
            for one, row, got in zip(alone, rows, attend(step), strict=True):
                np.testing.assert_array_equal(got, one[row.past :][: row.count])


def laid_out(code: str):
    rng = np.random.default_rng(0)
    shape = Shape(1, 1, rows=1, columns=1, num_blocks=3)
    return lay_out_codes(0, GEOMETRY, code, [random_sequence(rng, GEOMETRY, 5)], [Row(4, 1)], shape)[0]


@each_code
@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda step: {"scales": None}, "pages of {code} are codes; give their scales"),
        (
            lambda step: {"staged": step.staged.astype("float32")},
            "float32 staged and {code} pages; give both",
        ),
        (
            lambda step: {"scales": (step.scales[0][:, :1], step.scales[1])},
            r"staged \(1, 2, 2, 64\) have scales float32\(1, 1, 2\); give float32",
        ),
        (
            lambda step: {"scales": (step.scales[0], step.scales[1].astype("float16"))},
            r"pages \(3, 2, 2, 16, 64\) have scales float16\(3, 2, 2, 16\); give float32",
        ),
    ],
)
def test_R1_codes_and_scales_that_do_not_fit_are_named(code, change, culprit):
    step = laid_out(code)
    wrong = dataclasses.replace(step, **change(step))
    with pytest.raises(ValueError, match=culprit.format(code=code)):
        attend(wrong)


def test_R1_scales_of_pages_that_hold_no_codes_are_refused():
    rng = np.random.default_rng(0)
    plain = lay_out(rng, GEOMETRY, [random_sequence(rng, GEOMETRY, 5)], [Row(4, 1)], laid_out("int8").shape)
    scales = (plain.staged[..., 0], plain.pages[..., 0])
    with pytest.raises(ValueError, match="scales are given for float32 staged and float32 pages"):
        paged_attention(
            plain.query,
            plain.staged,
            plain.pages,
            plain.block_table,
            plain.tiles,
            tile_size=1,
            scale=1.0,
            scales=scales,
        )
