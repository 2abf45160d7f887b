"""S2: shapes computed inside a graph are folded while tracing; what would mix packed tokens is refused by name."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import edited, logits, model

Edit = Callable[[onnx.ModelProto], None]
SOURCE = model("cpu-fp32", "qwen3")
TOKENS = np.random.default_rng(5).integers(0, 320, 9)
ROWS = np.array([8, 0, 3])


def load(folder: Path) -> onnx_import.Decoder:
    return onnx_import.import_decoder(onnx_import.read_folder(folder))


def constant(proto: onnx.ModelProto, name: str, value: object, dtype: type = np.int64) -> str:
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, dtype), name))
    return name


def insert(proto: onnx.ModelProto, at: int, *nodes: onnx.NodeProto) -> None:
    for node in reversed(nodes):
        proto.graph.node.insert(at, node)


def node(op_type: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, inputs, [output], name=f"/{output}", **attributes)


def before_head(proto: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Insert nodes that turn the last hidden state, named x here, into y before the head."""
    head = proto.graph.node[-1]
    insert(proto, len(proto.graph.node) - 1, node("Identity", [head.input[0]], "x"), *nodes)
    head.input[0] = "y"


def computed_targets(proto: onnx.ModelProto) -> None:
    """Every Reshape to [batch, length, width], and one more before the head, by sizes taken from input_ids once."""
    for reshape in proto.graph.node:
        if reshape.op_type == "Reshape" and reshape.name.endswith("_2"):
            reshape.input[1] = "target"
    before_head(proto, node("Reshape", ["x", "target"], "y"))
    zero, one, rest = (
        constant(proto, name, [value]) for name, value in (("zero", 0), ("one", 1), ("rest", -1))
    )
    constant(proto, "first", 0)
    insert(
        proto,
        0,
        node("Shape", ["input_ids"], "sizes"),
        node("Gather", ["sizes", "first"], "batch"),
        node("Unsqueeze", ["batch", zero], "batches"),
        node("Shape", ["input_ids"], "length", start=1),
        node("Mul", ["length", one], "lengths"),
        node("Concat", ["batches", "lengths", rest], "target", axis=0),
    )


def width_as_factor(proto: onnx.ModelProto) -> None:
    """A factor of sqrt(width) / 8, which is 1: floats computed from a shape that no number of tokens changes."""
    constant(proto, "eight", 8, np.float32)
    before_head(
        proto,
        node("Shape", ["x"], "width", start=-1),
        node("Cast", ["width"], "wide", to=onnx.TensorProto.FLOAT),
        node("Sqrt", ["wide"], "root"),
        node("Div", ["root", "eight"], "factor"),
        node("Mul", ["x", "factor"], "y"),
    )


def zeros_like(proto: onnx.ModelProto) -> None:
    """Adding ConstantOfShape(Shape(x)), one value for however many tokens."""
    before_head(
        proto,
        node("Shape", ["x"], "sizes"),
        node("ConstantOfShape", ["sizes"], "nothing"),
        node("Add", ["x", "nothing"], "y"),
    )


@pytest.mark.parametrize("edit", [computed_targets, width_as_factor, zeros_like])
def test_S2_values_that_follow_from_shapes_change_no_bit(tmp_path: Path, edit: Edit) -> None:
    """Above the last attention a shape counts all tokens, below it the selected rows."""
    ours = logits(load(edited(SOURCE, tmp_path / "copy", edit)), TOKENS, ROWS)
    np.testing.assert_array_equal(ours, logits(load(SOURCE), TOKENS, ROWS))


def length_as_factor(proto: onnx.ModelProto) -> None:
    before_head(
        proto,
        node("Shape", ["x"], "length", start=1, end=2),
        node("Cast", ["length"], "long", to=onnx.TensorProto.FLOAT),
        node("Mul", ["x", "long"], "y"),
    )


def counted_positions(proto: onnx.ModelProto) -> None:
    constant(proto, "first", 0)
    constant(proto, "step", 1)
    constant(proto, "zero", [0])
    constant(proto, "last", [-1])
    before_head(
        proto,
        node("Shape", ["x"], "length", start=1, end=2),
        node("Squeeze", ["length"], "long"),
        node("Range", ["first", "long", "step"], "places"),
        node("Cast", ["places"], "places32", to=onnx.TensorProto.FLOAT),
        node("Unsqueeze", ["places32", "last"], "column"),
        node("Add", ["x", "column"], "y"),
    )


def table_up_to_length(proto: onnx.ModelProto) -> None:
    constant(proto, "zero", [0])
    constant(proto, "table", np.ones((100, 64)), np.float32)
    before_head(
        proto,
        node("Shape", ["x"], "length", start=1, end=2),
        node("Slice", ["table", "zero", "length"], "rows"),
        node("Add", ["x", "rows"], "y"),
    )


def mean_token(proto: onnx.ModelProto) -> None:
    constant(proto, "axes", [1])
    before_head(proto, node("ReduceMean", ["x", "axes"], "mean"), node("Sub", ["x", "mean"], "y"))


def softmax_over_tokens(proto: onnx.ModelProto) -> None:
    before_head(proto, node("Softmax", ["x"], "y", axis=1))


def running_sum(proto: onnx.ModelProto) -> None:
    constant(proto, "axis", 1)
    before_head(proto, node("CumSum", ["x", "axis"], "y"))


def first_token(proto: onnx.ModelProto) -> None:
    for name, value in (("start", [0]), ("end", [1]), ("axis", [1])):
        constant(proto, name, value)
    before_head(
        proto, node("Slice", ["x", "start", "end", "axis"], "first_row"), node("Add", ["x", "first_row"], "y")
    )


def gathered_token(proto: onnx.ModelProto) -> None:
    constant(proto, "which", [0])
    before_head(proto, node("Gather", ["x", "which"], "row", axis=1), node("Add", ["x", "row"], "y"))


def attention_by_hand(proto: onnx.ModelProto) -> None:
    before_head(
        proto,
        node("Transpose", ["x"], "turned", perm=[0, 2, 1]),
        node("MatMul", ["x", "turned"], "scores"),
        node("MatMul", ["scores", "x"], "y"),
    )


def norm_of_all(proto: onnx.ModelProto) -> None:
    constant(proto, "scale", np.ones(1), np.float32)
    before_head(proto, node("LayerNormalization", ["x", "scale"], "y", axis=1))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (length_as_factor, r"ai.onnx::Mul \(node '/y'\) computes with 'B', which depends on the number"),
        (counted_positions, r"ai.onnx::Add \(node '/y'\) computes with 'B', which depends on the number"),
        (table_up_to_length, r"ai.onnx::Slice \(node '/rows'\) works across tokens"),
        (mean_token, r"ai.onnx::ReduceMean \(node '/mean'\) works across tokens"),
        (softmax_over_tokens, r"ai.onnx::Softmax \(node '/y'\) works across tokens"),
        (running_sum, r"ai.onnx::CumSum \(node '/y'\) works across tokens"),
        (first_token, r"ai.onnx::Slice \(node '/first_row'\) works across tokens"),
        (gathered_token, r"ai.onnx::Gather \(node '/row'\) works across tokens"),
        (attention_by_hand, r"ai.onnx::MatMul \(node '/y'\) works across tokens"),
        (norm_of_all, r"ai.onnx::LayerNormalization \(node '/y'\) works across tokens"),
    ],
)
def test_S2_what_would_mix_packed_tokens_is_refused_by_name(
    tmp_path: Path, edit: Edit, expected: str
) -> None:
    """E6 and S2: one request's result would depend on the others packed beside it."""
    folder = edited(SOURCE, tmp_path / "copy", edit)
    with pytest.raises(onnx_import.UnsupportedGraph, match=expected):
        load(folder)


def test_S2_attention_over_its_own_inputs_is_refused_in_a_decoder(tmp_path: Path) -> None:
    """The standard Attention without the caller's cache would see other requests' tokens."""

    def change(proto: onnx.ModelProto) -> None:
        next(opset for opset in proto.opset_import if not opset.domain).version = 23
        before_head(proto, node("Attention", ["x", "x", "x"], "y", q_num_heads=4, kv_num_heads=4))

    folder = edited(SOURCE, tmp_path / "copy", change)
    with pytest.raises(
        onnx_import.UnsupportedGraph, match=r"Attention \(node '/y'\) reads no cache named like"
    ):
        load(folder)
