"""Case C11: block-quantised weights of every layout against NumPy and ONNX Runtime."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_import
from onnx_import.ops.quantized import QuantisedWeight, dequantise, integer_matmul, quantise_rows
from tests.onnx_import.reference import edited, model, node_of, run_node, set_attribute

ZEROS = ("absent", "packed", "flat", "float")


def quantised(
    rows: int, columns: int, block: int, bits: int, zeros: str, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """MatMulNBits' constants for a random weight, and that weight written out code by code."""
    random = np.random.default_rng(seed)
    blocks = -(-columns // block)
    codes = random.integers(0, 1 << bits, (rows, blocks * block)).astype(np.uint8)
    scales = random.uniform(0.01, 0.1, (rows, blocks)).astype(np.float32)
    points = random.integers(0, 1 << bits, (rows, blocks)).astype(np.uint8)
    constants = {"B": pack(codes, bits).reshape(rows, blocks, -1), "scales": scales}
    if zeros == "absent":
        points[:] = 1 << (bits - 1)
    elif zeros == "float":
        constants["zero_points"] = points.astype(np.float32)
    else:
        packed = pack(points, bits)
        constants["zero_points"] = packed.reshape(-1) if zeros == "flat" else packed
    weight = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            at = row, column // block
            weight[row, column] = (int(codes[row, column]) - int(points[at])) * scales[at]
    return constants, weight


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] as bytes, two a byte with the low nibble first when bits is 4."""
    if bits == 8:
        return codes
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 100),
    block=st.sampled_from([16, 32, 64]),
    bits=st.sampled_from([4, 8]),
    zeros=st.sampled_from(ZEROS),
)
def test_case_C11_dequantised_weights_equal_the_definition(
    rows: int, columns: int, block: int, bits: int, zeros: str
) -> None:
    """Case C11: odd sizes, odd block counts, every layout of zero points."""
    constants, weight = quantised(rows, columns, block, bits, zeros)
    read = dequantise(*constants.values(), bits=bits, block_size=block, rows=rows, columns=columns)
    np.testing.assert_array_equal(read, weight)


@pytest.mark.parametrize("zeros", ["absent", "packed", "float"])
@pytest.mark.parametrize(("rows", "columns", "block"), [(3, 40, 16), (5, 96, 32), (2, 1000, 512)])
def test_case_C11_the_runtime_reads_the_same_weights(rows: int, columns: int, block: int, zeros: str) -> None:
    """Case C11: K=40, N=3, block 16 has three blocks a row, so packed zero points leave half a byte unused."""
    constants, weight = quantised(rows, columns, block, 4, zeros)
    node = onnx.helper.make_node(
        "MatMulNBits", ["A", *constants], ["Y"], domain="com.microsoft",
        K=columns, N=rows, bits=4, block_size=block, accuracy_level=1,
    )  # fmt: skip
    x = np.random.default_rng(1).standard_normal((4, columns), np.float32)
    np.testing.assert_allclose(run_node(node, {"A": x}, constants), x @ weight.T, rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(st.sampled_from([2, 5]), st.sampled_from([1, 37, 80]), st.integers(0, 2**32 - 1))
def test_integer_products_err_no_more_than_their_rounding(rows: int, width: int, seed: int) -> None:
    """S3: two int8 terms leave an activation within 1/508 of a step of 1/127 of its row's peak."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, width), np.float32) * np.exp(random.uniform(-5, 5, (rows, 1)))
    x = x.astype(np.float32)
    weight = quantise_rows(random.standard_normal((9, width), np.float32))
    values = np.asarray(weight.codes, np.float64) * np.asarray(weight.scale, np.float64)[:, None]
    bound = np.abs(x).max(axis=1, keepdims=True) / 127 / 508 * np.abs(values).sum(axis=1)
    error = np.abs(np.asarray(integer_matmul(x, weight), np.float64) - x.astype(np.float64) @ values.T)
    assert (error <= bound * 1.01 + 1e-5 * np.abs(x).max()).all()


def test_integer_product_of_zeros_is_zero() -> None:
    """S3: padding rows of zeros must not divide by zero, and rows of zero weights neither."""
    weight = quantise_rows(np.zeros((3, 8), np.float32))
    assert isinstance(weight, QuantisedWeight)
    assert (np.asarray(integer_matmul(np.zeros((2, 8), np.float32), weight)) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: set_attribute(node, "N", 161), "needs 7728 elements in B"),
        (lambda node: set_attribute(node, "bits", 3), "has bits=3"),
        (lambda node: set_attribute(node, "block_size", 24), "has block_size=24"),
        (lambda node: node.input.extend(["", "cos_cache"]), "uses the input 'g_idx'"),
    ],
)
def test_case_C11_wrong_sizes_are_refused_with_both_shapes(tmp_path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    """Case C11, S2: unknown bits or blocks, or sizes that don't fit, name the node."""
    folder = edited(model("cpu-int4"), tmp_path / "copy", lambda proto: change(node_of(proto, "MatMulNBits")))
    with pytest.raises(onnx_import.UnsupportedGraph, match=message) as caught:
        onnx_import.import_decoder(onnx_import.read_folder(folder))
    assert "/model/layers.0/attn/qkv_proj/MatMul_Q4" in str(caught.value)
