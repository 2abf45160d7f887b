"""A model folder's graph edited to choose between two pairs of rotary tables by length, as exports of phi3 do."""

import numpy as np
import onnx

from tests.onnx_import.attention_edits import rotate_outside

THRESHOLD, BLOCK = 32, 16


def tables(kind: type) -> dict[str, np.ndarray]:
    """Cosines and sines, the short ones of other frequencies and no more positions than the threshold."""
    found = {}
    for name, rows, factor, magnitude in (("large", 512, 0.4, 1.2), ("small", THRESHOLD, 1.0, 1.0)):
        angles = np.arange(rows)[:, None] * factor * 10000.0 ** (-np.arange(8) / 8)
        found[f"cos_cache_{name}"] = (magnitude * np.cos(angles)).astype(kind)
        found[f"sin_cache_{name}"] = (magnitude * np.sin(angles)).astype(kind)
    return found


def choose(proto: onnx.ModelProto, *, index: int = 1, compare: str = "Greater") -> None:
    """The form that exports of phi3 have in place of one pair of tables, with `If` over constants."""
    kept = [t for t in proto.graph.initializer if t.name not in ("cos_cache", "sin_cache")]
    kind = next(t for t in proto.graph.initializer if t.name == "cos_cache").data_type
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    arrays = tables(onnx.helper.tensor_dtype_to_np_dtype(kind))
    branches = {}
    for branch, name in (("then_branch", "large"), ("else_branch", "small")):
        pair = [f"cos_cache_{name}", f"sin_cache_{name}"]
        branches[branch] = onnx.helper.make_graph(
            [onnx.helper.make_node("Constant", [], [n], value=onnx.numpy_helper.from_array(arrays[n])) for n in pair],
            name,
            [],
            [onnx.helper.make_tensor_value_info(n, kind, None) for n in pair],
        )  # fmt: skip
    packed = any(value.name == "block_table" for value in proto.graph.input)
    constants = {"threshold": THRESHOLD, "index": index, "block": BLOCK}
    nodes = [
        onnx.helper.make_node(
            "Constant", [], [f"/{name}"], value=onnx.numpy_helper.from_array(np.array(value))
        )
        for name, value in constants.items()
    ]
    nodes += [
        onnx.helper.make_node("Shape", ["block_table" if packed else "attention_mask"], ["/shape"]),
        onnx.helper.make_node("Gather", ["/shape", "/index"], ["/columns"], axis=0),
        onnx.helper.make_node("Mul", ["/columns", "/block"], ["/scaled"]),
        onnx.helper.make_node(compare, ["/scaled" if packed else "/columns", "/threshold"], ["/over"]),
        onnx.helper.make_node("If", ["/over"], ["cos_cache", "sin_cache"], name="/If", **branches),
    ]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)


def move_positions(proto: onnx.ModelProto, *, moved: int = THRESHOLD, source: str = "position_ids") -> None:
    """The form for runtimes without `If`: one table, and positions of the whole batch moved behind the short part."""
    rotate_outside(proto)
    arrays = tables(np.float32)
    for name in ("cos_cache", "sin_cache"):
        index = next(i for i, t in enumerate(proto.graph.initializer) if t.name == name)
        joined = np.concatenate([arrays[f"{name}_small"], arrays[f"{name}_large"]])
        proto.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(joined, name))
    for node in proto.graph.node:
        if node.op_type == "RotaryEmbedding":
            node.input[1] = "/moved"
    constants = {"threshold": THRESHOLD, "offset": moved}
    nodes = [
        onnx.helper.make_node(
            "Constant", [], [f"/{name}"], value=onnx.numpy_helper.from_array(np.array(value))
        )
        for name, value in constants.items()
    ]
    nodes += [
        onnx.helper.make_node("ReduceMax", [source], ["/longest"], name="/longest", keepdims=0),
        onnx.helper.make_node("GreaterOrEqual", ["/longest", "/threshold"], ["/over"], name="/over"),
        onnx.helper.make_node("Cast", ["/over"], ["/one"], to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Mul", ["/one", "/offset"], ["/by"]),
        onnx.helper.make_node("Add", ["/by", "position_ids"], ["/moved"]),
    ]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)
