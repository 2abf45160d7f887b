"""S2: forms of standard operators that newer opsets gave up, and constants, against ONNX Runtime on one node.

ONNX's own node tests know the newest form of each operator only.
"""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_import.ops.elementwise import CAST_TARGETS
from tests.onnx_import.node_cases import Refused, run

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def one_node(op_type: str, opset: int, inputs: list[str], outputs: int, **attributes: Any) -> onnx.ModelProto:
    names = [f"y{i}" for i in range(outputs)]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op_type, inputs, names, **attributes)],
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [onnx.helper.make_empty_tensor_value_info(name) for name in names],
        [onnx.numpy_helper.from_array(np.array([2], np.int64), "two")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize(
    ("op_type", "opset", "inputs", "outputs", "attributes"),
    [
        ("Split", 11, ["x"], 2, {"axis": -1, "split": [1, 3]}),
        ("Split", 11, ["x"], 3, {"axis": 1}),
        ("Split", 13, ["x"], 2, {"axis": 0}),
        ("Slice", 9, ["x"], 1, {"starts": [1, -3], "ends": [9, -1], "axes": [1, 2]}),
        ("Slice", 9, ["x"], 1, {"starts": [1], "ends": [2]}),
        ("Unsqueeze", 12, ["x"], 1, {"axes": [0, -1]}),
        ("Clip", 10, ["x"], 1, {"min": -0.5, "max": 0.25}),
        ("Clip", 10, ["x"], 1, {"max": 0.25}),
        ("TopK", 9, ["x"], 2, {"k": 2, "axis": 1}),
        ("TopK", 10, ["x", "two"], 2, {}),
        ("Softmax", 12, ["x"], 1, {}),
        ("Softmax", 12, ["x"], 1, {"axis": -1}),
        ("LogSoftmax", 12, ["x"], 1, {"axis": 0}),
        ("ReduceSum", 12, ["x"], 1, {"axes": [0, -1], "keepdims": 0}),
        ("ReduceSum", 12, ["x"], 1, {}),
        ("ReduceMean", 17, ["x"], 1, {"axes": [-1]}),
        ("ReduceMax", 17, ["x"], 1, {"axes": [1], "keepdims": 0}),
        ("ReduceMin", 17, ["x"], 1, {"axes": [1, 2]}),
        ("Flatten", 10, ["x"], 1, {"axis": 2}),
        ("Cast", 12, ["x"], 1, {"to": onnx.TensorProto.INT32}),
        ("LpNormalization", 12, ["x"], 1, {"axis": 1, "p": 1}),
    ],
)
def test_S2_older_forms_agree_with_onnx_runtime(
    op_type: str, opset: int, inputs: list[str], outputs: int, attributes: dict[str, Any]
) -> None:
    model = one_node(op_type, opset, inputs, outputs, **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for ours, theirs in zip(run(model, {"x": X}), session.run(None, {"x": X}), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("source", CAST_TARGETS.values(), ids=str)
@pytest.mark.parametrize("target", CAST_TARGETS, ids=lambda kind: onnx.TensorProto.DataType.Name(kind))
def test_S2_casts_between_all_types_agree_with_numpy(source: np.dtype, target: int) -> None:
    """Values that both types hold: beyond these ONNX leaves the result open."""
    values = np.array([0, 1, 1.75, 3, 100]) if source.kind in "fV" else np.array([0, 1, 3, 100])
    x = values.astype(source)
    cast = onnx.helper.make_node("Cast", ["x"], ["y"], to=target)
    kind = onnx.helper.np_dtype_to_tensor_dtype(source)
    value = onnx.helper.make_tensor_value_info("x", kind, x.shape)
    graph = onnx.helper.make_graph([cast], "one", [value], [onnx.helper.make_empty_tensor_value_info("y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    (result,) = run(model, {"x": x})
    assert result.dtype == CAST_TARGETS[target]
    np.testing.assert_array_equal(result, x.astype(CAST_TARGETS[target]))


def test_S2_a_squeeze_by_attribute_drops_axes_of_one() -> None:
    model = one_node("Squeeze", 11, ["x"], 1, axes=[1])
    np.testing.assert_array_equal(run(model, {"x": X[:, :1]})[0], X[:, 0])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("value_int", 7, np.int32(7)),
        ("value_ints", [7, -2], np.array([7, -2], np.int32)),
        ("value_float", 0.5, np.float32(0.5)),
        ("value_floats", [0.5, 2.0], np.array([0.5, 2], np.float32)),
    ],
)
def test_S2_constants_of_every_kind(name: str, value: Any, expected: np.ndarray) -> None:
    model = one_node("Constant", 13, [], 1, **{name: value})
    (result,) = run(model, {})
    np.testing.assert_array_equal(result, expected)
    assert result.shape == expected.shape


@pytest.mark.parametrize(
    ("op_type", "opset", "attributes", "expected"),
    [
        ("Add", 6, {}, "ai.onnx::Add .* at this opset"),
        ("Swish", 23, {}, "ai.onnx::Swish .* at this opset"),
        ("Split", 13, {"num_outputs": 1}, "attribute 'num_outputs', which isn't known"),
        ("Cast", 13, {"to": onnx.TensorProto.DOUBLE}, "has to=11, which isn't supported"),
        ("Gelu", 20, {"approximate": "sigmoid"}, "has approximate='sigmoid'"),
        ("Shape", 13, {"start": 1}, "attribute 'start', which isn't known"),
        ("Reshape", 13, {"allowzero": 1}, "attribute 'allowzero', which isn't known"),
        ("Softmax", 13, {"axis": 1, "temperature": 2.0}, "attribute 'temperature'"),
    ],
)
def test_S2_what_an_opset_does_not_have_is_refused_by_name(
    op_type: str, opset: int, attributes: dict[str, Any], expected: str
) -> None:
    inputs = ["x", "two"] if op_type in ("Add", "Reshape") else ["x"]
    with pytest.raises(Refused, match=expected):
        run(one_node(op_type, opset, inputs, 1, **attributes), {"x": X})


def test_S2_a_constant_past_32_bits_is_refused_by_name() -> None:
    model = one_node("Add", 14, ["two", "two"], 1)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([2**31], np.int64), "two"))
    with pytest.raises(Refused, match="integers in A 'two' that don't fit 32 bits"):
        run(model, {})


@pytest.mark.parametrize(
    ("op_type", "weight", "attributes"),
    [
        ("MatMul", (4, 5), {}),
        ("Gemm", (5, 4), {"transB": 1, "alpha": 0.5}),
        ("LayerNormalization", (4,), {}),
        ("RMSNormalization", (4,), {}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_S2_narrow_weights_give_the_float32_result_rounded(
    op_type: str, weight: tuple[int, ...], attributes: dict[str, Any], dtype: type
) -> None:
    """Sums are taken in float32; a result differs by the few roundings of its own type."""
    random = np.random.default_rng(1)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in ((3, 4), weight))

    def result(kind: type) -> np.ndarray:
        model = one_node(op_type, 23, ["x", "w"], 1, **attributes)
        elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", elem_type, x.shape))
        model.graph.initializer.append(onnx.numpy_helper.from_array(w.astype(kind), "w"))
        return run(model, {"x": x.astype(kind)})[0]

    narrow, wide = result(dtype), result(np.float32)
    assert narrow.dtype == dtype
    digits = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(narrow.astype(np.float32), wide, rtol=3 * digits, atol=digits / 4)
