"""GGML blocks as ONNX blocks: the same weights, as exactly as float32 allows."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jaxengine.demo.block_quantised import BlockQuantised, from_q4_1, from_q8_0, stacked
from jaxengine.demo.gguf_reader import GgufTensor, interleaved_to_halves

ROWS, BLOCKS = 3, 2
# ggml stores d >= 0; a subnormal d is legal and -m / d must not overflow there.
DELTAS = npst.arrays("<f2", (ROWS, BLOCKS, 1), elements=st.floats(0, 65504, width=16))
SIGNED = npst.arrays("<f2", (ROWS, BLOCKS, 1), elements=st.floats(-65504, 65504, width=16))


def codes(size: int) -> st.SearchStrategy[np.ndarray]:
    return npst.arrays(np.uint8, (ROWS, BLOCKS, size))


def tensor(kind: str, *parts: np.ndarray) -> GgufTensor:
    raw = np.concatenate([part.view(np.uint8) for part in parts], -1)
    return GgufTensor("weight", kind, raw.reshape(ROWS, -1))


@given(DELTAS, SIGNED, codes(16))
def test_q4_1_weights_differ_from_ggufs_by_no_more_than_the_stated_rounding(d, m, packed):
    stored = tensor("Q4_1", d, m, packed)
    expected = stored.dequantised().astype(np.float64)
    minima = np.repeat(np.abs(m.astype(np.float64)).reshape(ROWS, BLOCKS), 32, axis=1)
    bound = 2.0**-24 * (minima + 2 * np.abs(expected)) * 1.0001 + 2.0**-149
    assert (np.abs(from_q4_1(stored).dequantised() - expected) <= bound).all()


@given(SIGNED, codes(16))
def test_a_constant_q4_1_block_is_exact_whatever_its_codes(m, packed):
    stored = tensor("Q4_1", np.zeros_like(m), m, packed)
    np.testing.assert_array_equal(from_q4_1(stored).dequantised(), stored.dequantised())


@given(DELTAS, SIGNED, codes(16))
def test_q4_1_codes_are_kept_and_zero_points_are_finite(d, m, packed):
    made = from_q4_1(tensor("Q4_1", d, m, packed))
    elements = np.concatenate([packed & 15, packed >> 4], -1)
    kept = np.stack([made.codes & 15, made.codes >> 4], -1).reshape(elements.shape)
    np.testing.assert_array_equal(kept, np.where(d == 0, 0, elements))
    assert np.isfinite(made.zero_points).all()


@given(SIGNED, codes(32))
def test_q8_0_weights_are_equal(d, packed):
    stored = tensor("Q8_0", d, packed)
    np.testing.assert_array_equal(from_q8_0(stored).dequantised(), stored.dequantised())


def test_element_order_of_one_block():
    """Element i of the block is worth i mod 16: codes counted through both halves of ggml's layout."""
    low_and_high = np.arange(16, dtype=np.uint8) * 17  # byte j: element j and element j + 16 both j
    raw = np.concatenate([np.array([1, 0], "<f2").view(np.uint8), low_and_high])
    made = from_q4_1(GgufTensor("weight", "Q4_1", raw[None]))
    np.testing.assert_array_equal(made.dequantised()[0], np.tile(np.arange(16), 2))
    assert made.codes[0, 0, 0] == 0x10  # ONNX Runtime: element 0 low, element 1 high


@pytest.mark.parametrize("bits", [4, 8])
def test_stacked_dequantises_to_the_parts_on_top_of_each_other(bits):
    random = np.random.default_rng(0)

    def part(rows: int) -> BlockQuantised:
        zeros = random.uniform(0, 15, (rows, 2)).astype(np.float32) if bits == 4 else None
        packed = random.integers(0, 256, (rows, 2, 4 * bits), dtype=np.uint8)
        return BlockQuantised(bits, packed, random.uniform(size=(rows, 2)).astype(np.float32), zeros)

    parts = [part(2), part(3)]
    np.testing.assert_array_equal(
        stacked(parts).dequantised(), np.concatenate([part.dequantised() for part in parts])
    )


@given(st.integers(1, 5), st.integers(1, 16))
def test_row_order_undoes_llama_cpps_permutation(heads, half):
    original = np.arange(heads * 2 * half)
    # LlamaModel.permute of llama.cpp's converter
    permuted = original.reshape(heads, 2, half).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(permuted[interleaved_to_halves(heads, 2 * half)], original)


def test_dequantised_is_the_gguf_packages():
    values = np.random.default_rng(1).normal(size=(ROWS, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    made = from_q4_1(GgufTensor("weight", "Q4_1", raw)).dequantised()
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(made, expected, rtol=0, atol=2.0**-23 * np.abs(expected).max())
