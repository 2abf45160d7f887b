"""A llama of any depth and width, as a model folder: the committed fixture with its second layer repeated.

Every name in the exporter's graph that belongs to a layer holds its number, so a layer further on is the second one
with its numbers moved on. Weights are random, and widening gives the model more heads, not wider ones, so that the
rotary tables stay.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "models" / "cpu-fp32" / "llama"
_NUMBERED = re.compile(r"\b(layers|past_key_values|present)\.(\d+)\b")
_REPEATED = 1
"""The layer that is repeated, the fixture's last one; the number after it is that of the norm behind all layers."""


def write_folder(folder: Path, layers: int, widen: int = 1) -> Path:
    """Writes a model of `layers` layers, at least 2, of `widen` times the fixture's widths; returns `folder`.

    The same arguments give the same weights.
    """
    settings = json.loads((FIXTURE / "genai_config.json").read_text())
    model = onnx.load(str(FIXTURE / "model.onnx"))
    graph = model.graph
    # What is as wide as a layer is widened: neither the vocabulary nor the rotary tables are.
    widths = {size for tensor in graph.initializer if _number(tensor) >= 0 for size in tensor.dims}
    tensors = _each_layer(graph.initializer, layers)
    for tensor in tensors:
        if widths.intersection(tensor.dims):
            shape = [size * widen if size in widths else size for size in tensor.dims]
            tensor.CopyFrom(_weight(tensor.name, shape))
    nodes = _in_order(graph.node, layers)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("num_heads", "kv_num_heads"):
                attribute.i *= widen
    inputs, outputs = _each_layer(graph.input, layers), _each_layer(graph.output, layers)
    for value in (*inputs, *outputs):
        if _number(value) >= 0:
            value.type.tensor_type.shape.dim[1].dim_value *= widen
    deep = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, graph.name, inputs, outputs, tensors),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    file = folder / "model.onnx"
    onnx.save_model(
        deep, str(file), save_as_external_data=True, location=f"{file.name}.data", size_threshold=0
    )
    decoder = settings["model"]["decoder"]
    decoder["num_hidden_layers"] = layers
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        decoder[key] *= widen
    (folder / "genai_config.json").write_text(json.dumps(settings))
    return folder


def _number(proto: Any) -> int:
    """The layer of a node, tensor or value, -1 for none."""
    match = _NUMBERED.search(proto.name)
    return int(match[2]) if match else -1


def _moved(proto: Any, by: int) -> Any:
    """A copy with the layers in its names moved on."""

    def rename(name: str) -> str:
        return _NUMBERED.sub(lambda match: f"{match[1]}.{int(match[2]) + by}", name)

    copy = type(proto)()
    copy.CopyFrom(proto)
    copy.name = rename(proto.name)
    if isinstance(copy, onnx.NodeProto):
        copy.input[:] = map(rename, proto.input)
        copy.output[:] = map(rename, proto.output)
    return copy


def _each_layer(protos: Sequence[Any], layers: int) -> list[Any]:
    """Tensors or values, with those of the repeated layer once for each layer that it stands for."""
    last = layers - 1 - _REPEATED
    moves = {_REPEATED: range(last + 1), _REPEATED + 1: (last,)}
    return [_moved(proto, by) for proto in protos for by in moves.get(_number(proto), (0,))]


def _in_order(nodes: Sequence[onnx.NodeProto], layers: int) -> list[onnx.NodeProto]:
    """The nodes, with the whole run of the repeated layer's once for each layer that it stands for."""
    last = layers - 1 - _REPEATED
    places = [place for place, node in enumerate(nodes) if _number(node) == _REPEATED]
    first, end = places[0], places[-1] + 1
    repeated = [_moved(node, by) for by in range(last + 1) for node in nodes[first:end]]
    return [*nodes[:first], *repeated, *(_moved(node, last) for node in nodes[end:])]


def _weight(name: str, shape: list[int]) -> onnx.TensorProto:
    """Random numbers of a size that keeps activations as they are; those of a norm lie around one."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    scaled = 1 + values / 8 if len(shape) == 1 else values / np.float32(np.sqrt(shape[0]))
    return onnx.numpy_helper.from_array(scaled, name)
