"""Case C11: block-quantised weights of every layout against NumPy and ONNX Runtime."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_import
from onnx_import.ops import packing
from onnx_import.ops.packing import dequantise
from onnx_import.ops.quantized import QuantisedWeight, integer_matmul, quantise_rows
from tests.onnx_import.one_node import imported, node, problems, runtime
from tests.onnx_import.reference import edited, model, node_of, set_attribute

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
    """Codes [rows, n] as bytes, the first one in the lowest bits; the last byte of a row may be filled in part."""
    fields = 8 // bits
    packed = np.zeros((codes.shape[0], -(-codes.shape[1] // fields)), np.uint8)
    for column in range(codes.shape[1]):
        packed[:, column // fields] |= codes[:, column] << (column % fields * bits)
    return packed


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 100),
    block=st.sampled_from([16, 32, 64]),
    bits=st.sampled_from([2, 4, 8]),
    zeros=st.sampled_from(ZEROS),
)
def test_case_C11_dequantised_weights_equal_the_definition(
    rows: int, columns: int, block: int, bits: int, zeros: str
) -> None:
    """Case C11: odd sizes, odd block counts, every layout of zero points."""
    constants, weight = quantised(rows, columns, block, bits, zeros)
    read = dequantise(*constants.values(), bits=bits, block_size=block, rows=rows, columns=columns)
    np.testing.assert_array_equal(read, weight)


@given(count=st.integers(1, 40), bits=st.sampled_from([2, 4, 8]), seed=st.integers(0, 2**32 - 1))
def test_case_C11_packing_is_the_inverse_of_unpacking(count: int, bits: int, seed: int) -> None:
    """Case C11: any number of codes a row, the last byte filled in part."""
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, count)).astype(np.uint8)
    packed = packing.pack(codes, bits)
    assert packed.shape == (3, packing.packed_bytes(count, bits))
    np.testing.assert_array_equal(packed, pack(codes, bits))
    np.testing.assert_array_equal(packing.unpack(packed, bits, count), codes)


SIZES = [(3, 40, 16), (5, 96, 32), (4, 130, 64), (3, 40, 128), (2, 300, 256), (2, 1000, 512), (2, 40, 1024)]


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(("rows", "columns", "block"), SIZES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_case_C11_products_agree_with_the_definition_and_the_runtime(
    rows: int, columns: int, block: int, bits: int, zeros: str
) -> None:
    """Case C11: K=40, N=3, block 16 has three blocks a row, so packed zero points leave a part of a byte unused."""
    constants, weight = quantised(rows, columns, block, bits, zeros)
    constants["bias"] = np.arange(rows, dtype=np.float32)
    proto = node(
        "MatMulNBits", f"A B scales {'zero_points' if zeros != 'absent' else '-'} - bias",
        K=columns, N=rows, bits=bits, block_size=block, accuracy_level=1,
    )  # fmt: skip
    feed = {"A": np.random.default_rng(1).standard_normal((4, columns), np.float32)}
    expected = feed["A"] @ weight.T + constants["bias"]
    (found,) = imported(proto, feed, constants)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4 * np.abs(weight).max())
    # ONNX Runtime refuses longer blocks of 2 bits on a CPU, and float zero points of 8 bits.
    if not (bits == 2 and block > 256) and not (bits == 8 and zeros == "float"):
        theirs = runtime(proto, feed, constants)[0]
        np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-4 * np.abs(weight).max())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("zeros", ["absent", "packed", "float"])
def test_case_C11_narrow_scales_round_a_weight_once(dtype: type, zeros: str) -> None:
    """Case C11, S2: float16 and bfloat16 scales, for packed int4 exports."""
    constants, _ = quantised(3, 40, 16, 4, zeros)
    constants = {
        name: array.astype(dtype) if array.dtype != np.uint8 else array for name, array in constants.items()
    }
    wide = {
        name: array.astype(np.float32) if array.dtype == dtype else array for name, array in constants.items()
    }
    sizes = {"bits": 4, "block_size": 16, "rows": 3, "columns": 40}
    found = dequantise(*constants.values(), **sizes)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, dequantise(*wide.values(), **sizes).astype(dtype))


def test_case_C11_an_absent_zero_point_may_be_an_empty_name() -> None:
    """Case C11: what follows an empty input is still read."""
    constants, weight = quantised(3, 40, 16, 4, "absent")
    feed = {"A": np.ones((2, 40), np.float32)}
    for inputs in ("A B scales", "A B scales -", "A B scales - -"):
        (found,) = imported(node("MatMulNBits", inputs, K=40, N=3, block_size=16), feed, constants)
        np.testing.assert_allclose(found, feed["A"] @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("B", (3, 2, 8), "needs 72 elements in B, [3, 3, 8], but its shape is [3, 2, 8]"),
        ("B", (0, 3, 8), "needs 72 elements in B, [3, 3, 8], but its shape is [0, 3, 8]"),
        ("scales", (3, 2), "needs 9 elements in scales, [3, 3], but its shape is [3, 2]"),
        ("zero_points", (3, 1), "needs 6 elements in zero_points, [3, 2], but its shape is [3, 1]"),
        ("zero_points", (5,), "needs 6 elements in zero_points, [3, 2], but its shape is [5]"),
        ("bias", (4,), "needs 3 elements in bias, [3], but its shape is [4]"),
    ],
)
def test_case_C11_wrong_shapes_are_refused_with_the_right_ones(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    """Case C11: also zero points packed across rows (five bytes for nine of them), and an omitted projection."""
    constants, _ = quantised(3, 40, 16, 4, "packed")
    constants["bias"] = np.zeros(3, np.float32)
    constants[name] = np.zeros(shape, constants[name].dtype)
    proto = node("MatMulNBits", "A B scales zero_points - bias", K=40, N=3, block_size=16)
    (problem,) = problems(proto, constants, {"A": np.zeros((2, 40), np.float32)})
    assert problem.endswith(message)


@pytest.mark.parametrize(
    ("name", "value"), [("bits", 3), ("block_size", 8), ("block_size", 48), ("weight_prepacked", 1)]
)
def test_case_C11_unknown_layouts_are_refused(name: str, value: int) -> None:
    """Case C11: no bits, blocks or layouts but those of the definition."""
    constants, _ = quantised(3, 40, 16, 4, "absent")
    attributes = {"K": 40, "N": 3, "bits": 4, "block_size": 16} | {name: value}
    (problem,) = problems(
        node("MatMulNBits", "A B scales", **attributes), constants, {"A": np.zeros((2, 40), np.float32)}
    )
    assert f"has {name}={value}, which isn't supported" in problem


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


def test_S2_other_quantised_products_are_named(tmp_path: Path) -> None:
    """S2: the 4-bit floats of bitsandbytes."""

    def change(proto: onnx.ModelProto) -> None:
        node_of(proto, "MatMulNBits").op_type = "MatMulBnb4"

    folder = edited(model("cpu-int4"), tmp_path / "copy", change)
    with pytest.raises(onnx_import.UnsupportedGraph) as caught:
        onnx_import.import_decoder(onnx_import.read_folder(folder))
    (problem,) = caught.value.problems
    assert problem.startswith(
        "com.microsoft::MatMulBnb4 (node '/model/layers.0/attn/qkv_proj/MatMul_Q4') isn't supp"
    )
