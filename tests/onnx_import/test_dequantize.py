"""S2, S3: weights that a graph dequantises itself, against ONNX Runtime."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from tests.onnx_import.one_node import imported, node, problems, runtime

KINDS = {np.int8: (-128, 128), np.uint8: (0, 256), ml_dtypes.int4: (-8, 8), ml_dtypes.uint4: (0, 16)}
FORMS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((), {}),
    ((1,), {}),
    ((5,), {"axis": 1}),
    ((40,), {"axis": 0}),
    ((40,), {"axis": -2}),
    ((3, 5), {"axis": 0, "block_size": 16}),
    ((40, 1), {"axis": 1, "block_size": 16}),
]


def constants(
    kind: Any, shape: tuple[int, ...], dtype: Any = np.float32, *, zeros: bool = True
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(len(shape))
    made = {
        "x": random.integers(*KINDS[kind], (40, 5)).astype(kind),
        "scale": np.asarray(random.uniform(0.01, 1, shape)).astype(dtype),
    }
    return made | ({"zero": np.asarray(random.integers(*KINDS[kind], shape)).astype(kind)} if zeros else {})


def proto(names: Any, **attributes: int) -> onnx.NodeProto:
    return node("DequantizeLinear", " ".join(names), domain="", **attributes)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("shape", "attributes"), FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_S3_integers_become_the_runtimes_floats(
    kind: Any, shape: tuple[int, ...], attributes: dict[str, int], zeros: bool
) -> None:
    """S3: a scale for all, for a row or column, or for a block, the last of which is filled in part."""
    made = constants(kind, shape, zeros=zeros)
    (found,) = imported(proto(made, **attributes), {}, made)
    np.testing.assert_array_equal(found, runtime(proto(made, **attributes), {}, made)[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_S2_narrow_scales_give_narrow_floats(dtype: Any) -> None:
    narrow, attributes = constants(np.int8, (5,), dtype), {"axis": 1}
    wide = narrow | {"scale": narrow["scale"].astype(np.float32)}
    (found,) = imported(proto(narrow, **attributes), {}, narrow)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, imported(proto(wide, **attributes), {}, wide)[0].astype(dtype))


@pytest.mark.parametrize(
    ("changes", "attributes", "message"),
    [
        ({"scale": np.ones(4, np.float32)}, {"axis": 1}, "needs x_scale of shape [5], but its shape is [4]"),
        (
            {"zero": np.ones(40, np.int8)},
            {"axis": 1},
            "needs x_zero_point of shape [5], but its shape is [40]",
        ),
        ({"zero": np.ones(5, np.uint8)}, {"axis": 1}, "x_zero_point of type uint8 for x of type int8"),
        ({}, {"axis": 2}, "has axis=2 and block_size=0 for x of shape [40, 5]"),
        ({}, {"axis": 0, "block_size": -1}, "has axis=0 and block_size=-1"),
        ({}, {"axis": 1, "output_dtype": 10}, "has output_dtype=10"),
        ({"x": np.ones((40, 5), np.int32)}, {"axis": 1}, "of type int32"),
    ],
)
def test_S2_what_does_not_fit_is_named(
    changes: dict[str, np.ndarray], attributes: dict[str, int], message: str
) -> None:
    made = constants(np.int8, (5,)) | changes
    (problem,) = problems(proto(made, **attributes), made)
    assert message in problem


def test_S2_activations_are_not_dequantised() -> None:
    """S2: only constants are."""
    made = {"scale": np.ones((), np.float32)}
    (problem,) = problems(proto(["x", "scale"]), made, {"x": np.ones((2, 3), np.int8)})
    assert "needs its input 'x' ('x') to be a constant" in problem
