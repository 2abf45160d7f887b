"""Case C11, S2: block-quantised embedding tables against ONNX Runtime and NumPy."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnx_import.graph import parse_graph
from onnx_import.ops import packing
from onnx_import.weights import WeightFiles
from tests.onnx_import.one_node import as_model, imported, node, problems, runtime

INDICES = np.array([[0, 9, 3], [7, 7, -1]], np.int64)


def table(
    rows: int, width: int, block: int, bits: int, *, zeros: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Constants of uint8 data and the table written out."""
    random = np.random.default_rng(rows + width + block + bits)
    blocks = -(-width // block)
    codes = random.integers(0, 1 << bits, (rows, width)).astype(np.uint8)
    points = random.integers(0, 1 << bits, (rows, blocks)).astype(np.uint8)
    scales = random.standard_normal((rows, blocks), np.float32)
    constants = {"data": packing.pack(codes, bits), "scales": scales}
    if zeros:
        constants["zero_points"] = packing.pack(points, bits)
    else:
        points[:] = 1 << (bits - 1)
    spread = np.arange(width) // block
    return constants, (codes.astype(np.float32) - points[:, spread]) * scales[:, spread]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("width", "block"), [(64, 16), (96, 32), (40, 16), (40, 512)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_case_C11_tables_agree_with_the_definition_and_the_runtime(
    bits: int, width: int, block: int, zeros: bool
) -> None:
    """Case C11: rows of odd numbers of blocks, the last one filled in part; negative indices count from the end."""
    constants, written = table(10, width, block, bits, zeros=zeros)
    proto = node(
        "GatherBlockQuantized", " ".join(["data", "ids", *list(constants)[1:]]), bits=bits, block_size=block
    )
    (found,) = imported(proto, {"ids": INDICES}, constants)
    np.testing.assert_array_equal(found, written[INDICES])
    np.testing.assert_array_equal(found, runtime(proto, {"ids": INDICES}, constants)[0])


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("shape", "gathered", "quantised"),
    [((10, 40), 0, 1), ((10, 40), 0, -1), ((40, 10), 1, 0), ((40, 10), 0, 0), ((10, 33), 1, 1), ((5, 40, 3), 0, 1),
     ((3, 10, 40), -2, 2)],
)  # fmt: skip
def test_case_C11_tables_of_4_bit_elements_agree_with_the_runtime(
    dtype: Any, zeros: bool, shape: tuple[int, ...], gathered: int, quantised: int
) -> None:
    """Case C11: signed and unsigned, any axes, also both the same; an absent zero point is zero."""
    random = np.random.default_rng(len(shape))
    low, high = (-8, 8) if dtype == ml_dtypes.int4 else (0, 16)
    blocks = list(shape)
    blocks[quantised] = -(-shape[quantised] // 16)
    constants = {
        "data": random.integers(low, high, shape).astype(dtype),
        "scales": random.standard_normal(blocks, np.float32),
    }
    if zeros:
        constants["zero_points"] = random.integers(low, high, blocks).astype(dtype)
    attributes = {"block_size": 16, "gather_axis": gathered, "quantize_axis": quantised}
    proto = node("GatherBlockQuantized", " ".join(["data", "ids", *list(constants)[1:]]), **attributes)
    ids = INDICES % shape[gathered]
    (found,) = imported(proto, {"ids": ids}, constants)
    np.testing.assert_array_equal(found, runtime(proto, {"ids": ids}, constants)[0])


@pytest.mark.parametrize(("shape", "gathered", "quantised"), [((10, 40), 0, 1), ((40, 10), 0, 0)])
def test_S2_ids_past_a_table_are_not_a_number(shape: tuple[int, int], gathered: int, quantised: int) -> None:
    """S2: noticed, where ONNX Runtime gives zeros and JAX would take the last row; also with blocks along the rows."""
    blocks = list(shape)
    blocks[quantised] = 3 if shape[quantised] == 40 else 1
    constants = {"data": np.ones(shape, ml_dtypes.int4), "scales": np.ones(blocks, np.float32)}
    attributes = {"block_size": 16, "gather_axis": gathered, "quantize_axis": quantised}
    rows = shape[gathered]
    ids = np.array([0, rows - 1, rows, rows + 5, -rows, -rows - 1], np.int64)
    (found,) = imported(
        node("GatherBlockQuantized", "data ids scales", **attributes), {"ids": ids}, constants
    )
    assert np.isfinite(found).all(axis=1).tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_S2_tables_of_narrow_scales_round_once(dtype: Any) -> None:
    constants, _ = table(10, 40, 16, 4, zeros=True)
    constants["scales"] = constants["scales"].astype(dtype)
    wide = constants | {"scales": constants["scales"].astype(np.float32)}
    proto = node("GatherBlockQuantized", "data ids scales zero_points", block_size=16)
    (found,) = imported(proto, {"ids": INDICES}, constants)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, imported(proto, {"ids": INDICES}, wide)[0].astype(dtype))


@pytest.mark.parametrize(
    ("change", "attributes", "message"),
    [
        ({}, {"bits": 3}, "has bits=3"),
        ({}, {"block_size": 24}, "has block_size=24"),
        ({}, {"block_size": 0}, "has block_size=0"),
        ({}, {"quantize_axis": 2}, "has quantize_axis=2 for data of shape [10, 20]"),
        ({}, {"gather_axis": 1, "quantize_axis": 0}, "only the first and the last axis are supported"),
        ({"scales": (10, 2)}, {}, "needs 30 elements in scales, [10, 3], but its shape is [10, 2]"),
        ({"zero_points": (10, 1)}, {}, "needs 20 elements in zero_points, [10, 2], but its shape is [10, 1]"),
    ],
)
def test_case_C11_tables_that_do_not_fit_are_refused(
    change: dict[str, tuple[int, ...]], attributes: dict[str, int], message: str
) -> None:
    constants, _ = table(10, 40, 16, 4, zeros=True)
    constants |= {name: np.zeros(shape, constants[name].dtype) for name, shape in change.items()}
    proto = node("GatherBlockQuantized", "data ids scales zero_points", **({"block_size": 16} | attributes))
    (problem,) = problems(proto, constants, {"ids": INDICES})
    assert message in problem


def test_case_C11_4_bit_elements_take_no_other_types_beside_them() -> None:
    constants = {
        "data": np.ones((4, 16), ml_dtypes.int4),
        "scales": np.ones((4, 1), np.float32),
        "zero_points": np.ones((4, 1), np.uint8),
    }
    proto = node("GatherBlockQuantized", "data ids scales zero_points", block_size=16, bits=8)
    kinds, bits = problems(proto, constants, {"ids": INDICES})
    assert "zero_points of type uint8 for data of type int4" in kinds
    assert "bits=8 for data of type int4" in bits


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_S4_4_bit_elements_are_read_from_external_data(tmp_path: Path, dtype: Any) -> None:
    """S4: two in a byte, an odd number of them, each size checked before it is read."""
    values = np.arange(15).astype(np.int8) - (8 if dtype == ml_dtypes.int4 else 0)
    constants = {"data": values.astype(dtype).reshape(3, 5), "scales": np.ones((3, 1), np.float32)}
    model = as_model(
        node("GatherBlockQuantized", "data ids scales", block_size=16), {"ids": INDICES}, constants
    )
    onnx.save_model(
        model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=1
    )
    graph = parse_graph(tmp_path / "model.onnx")
    tensor = graph.tensors["data"]
    assert (tensor.location, tensor.nbytes, tensor.length) == ("data", 8, 8)
    read = WeightFiles(graph).read(tensor)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read.astype(np.int8), values.reshape(3, 5))


def test_E6_a_row_of_a_table_has_the_same_bits_in_any_company() -> None:
    """E6: looked up and dequantised element by element."""
    constants, _ = table(10, 40, 16, 4, zeros=True)
    proto = node("GatherBlockQuantized", "data ids scales zero_points", block_size=16)
    ids = np.arange(64) % 10
    whole = imported(proto, {"ids": ids}, constants, jit=True)[0]
    np.testing.assert_array_equal(imported(proto, {"ids": ids[:2]}, constants, jit=True)[0], whole[:2])
