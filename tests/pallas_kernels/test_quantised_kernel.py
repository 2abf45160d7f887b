"""The attention kernel over codes of 8 bits, interpreted with race detection, against plain float64 attention."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels import paged_attention
from pallas_kernels.quantisation import LARGEST_CODE
from tests.pallas_kernels.ragged import (
    PLAIN,
    Extras,
    Geometry,
    Row,
    Shape,
    lay_out_codes,
    random_sequence,
    reference,
    uneven,
)
from tests.pallas_kernels.test_attention_kernel import (
    DECODE,
    PREFILL,
    attend,
    interpreted,
    ragged,
    shape_for,
    tolerance,
)

CODES = tuple(map(str, LARGEST_CODE))
# name: heads and blocks, what the layer asks, tile size, whether the split is fixed
CASES = {
    "decode": (Geometry(2, 1, 64, 16), PLAIN, DECODE, False),
    "prefill by two warpgroups": (Geometry(16, 1, 64, 64), PLAIN, PREFILL, False),
    "bfloat16, fixed split": (Geometry(2, 1, 80, 128, "bfloat16"), PLAIN, DECODE, True),
    "float16": (Geometry(2, 1, 96, 32, "float16"), Extras(softcap=3.0, sinks=(0.5, -2.0)), PREFILL, False),
    "wide heads": (Geometry(2, 1, 256, 16), PLAIN, DECODE, False),
    "ring": (Geometry(2, 1, 64, 16), Extras(window=30, ring=4), DECODE, False),
}
each_code = pytest.mark.parametrize("code", CODES)
seeds = st.integers(0, 2**32 - 1)


def most_error(geometry: Geometry, sequences) -> float:
    """That of the kernel without codes, whose weights over float16 are bfloat16 here; codes themselves are exact."""
    dtype = "bfloat16" if geometry.dtype == "float16" else geometry.dtype
    return tolerance(dataclasses.replace(geometry, dtype=dtype), sequences)


@interpreted
@pytest.mark.slow
@each_code
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=2)
@given(data=st.data(), seed=seeds)
def test_R1_R2_R4_kernel_over_codes_equals_plain_float64_attention(case, code, data, seed):
    """Codes and scales of slots that hold nothing are NaN."""
    geometry, extras, tile_size, fixed = CASES[case]
    rng = np.random.default_rng(seed)
    rows = data.draw(ragged(tile_size))
    sequences = [uneven(rng, random_sequence(rng, geometry, row.past + row.count)) for row in rows]
    shape = shape_for(geometry, tile_size)
    step, meant = lay_out_codes(seed, geometry, code, sequences, rows, shape, extras)
    most = most_error(geometry, meant)
    for sequence, row, got in zip(meant, rows, attend(step, geometry, extras, fixed), strict=True):
        expected = reference(sequence, row, geometry.scale, extras=extras)
        np.testing.assert_allclose(got.astype(np.float64), expected, atol=most, rtol=0)
    assert not get_races().races_found


@each_code
def test_R5_C22_blocks_whose_scales_no_copy_takes_are_refused(code):
    geometry, shape = Geometry(2, 1, 64, 8, "bfloat16"), Shape(1, DECODE, 1, 2, 4)
    sequence = random_sequence(np.random.default_rng(0), geometry, 10)
    step, _ = lay_out_codes(0, geometry, code, [sequence], [Row(9, 1)], shape)
    with pytest.raises(ValueError, match="blocks of 16 slots or more with scales, not 8; give backend='xla'"):
        paged_attention(
            step.query,
            step.staged,
            step.pages,
            step.block_table,
            step.tiles,
            tile_size=DECODE,
            scale=1.0,
            scales=step.scales,
            backend="mosaic_gpu",
        )
