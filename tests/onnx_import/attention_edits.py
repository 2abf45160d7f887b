"""Edits of a model folder's graph that give its attention what other exports have."""

from typing import Any

import numpy as np
import onnx

from tests.onnx_import.reference import set_attribute

SINKS = np.array([-20.0, -1.0, 0.0, 1.0, 2.0, 4.0])


def every_attention(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type in ("GroupQueryAttention", "PagedAttention")]


def window_first_layer(proto: onnx.ModelProto) -> None:
    """What gemma2 has: one windowed layer of two, the second block table in the packed form."""
    node = every_attention(proto)[0]
    set_attribute(node, "local_window_size", 8)
    if node.op_type == "PagedAttention":
        node.input[7] = "block_table_windowed"
        table = onnx.helper.make_tensor_value_info("block_table_windowed", onnx.TensorProto.INT32, ["b", "n"])
        proto.graph.input.append(table)


def cap(proto: onnx.ModelProto) -> None:
    for node in every_attention(proto):
        set_attribute(node, "softcap", 3.0)


def sink(proto: onnx.ModelProto) -> None:
    """What gpt-oss has: a constant logit a head."""
    for layer, node in enumerate(every_attention(proto)):
        kind = np.float32 if node.op_type == "GroupQueryAttention" else np.float16
        node.input.extend([""] * (12 - len(node.input)))
        node.input[11] = f"sinks.{layer}"
        proto.graph.initializer.append(
            onnx.numpy_helper.from_array(np.roll(SINKS, layer).astype(kind), f"sinks.{layer}")
        )


def rotate_outside(proto: onnx.ModelProto, op_type: str = "RotaryEmbedding", **attributes: Any) -> None:
    """qwen3's query and key, rotated by an operator from position_ids instead of inside attention."""
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            for index, heads in ((0, 4), (1, 2)):
                name = f"{node.name}/rotary_{index}"
                nodes.append(
                    onnx.helper.make_node(
                        op_type, [node.input[index], "position_ids", "cos_cache", "sin_cache"],
                        [name], name=name, domain="com.microsoft", **({"num_heads": heads} | attributes),
                    )
                )  # fmt: skip
                node.input[index] = name
            node.input[7] = node.input[8] = ""
            set_attribute(node, "do_rotary", 0)
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    shape = ["b", "s"] if op_type == "RotaryEmbedding" else [3, "b", "s"]
    ids = onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, shape)
    proto.graph.input.append(ids)
