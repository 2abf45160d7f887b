"""A llama decoder as the ONNX graph that ONNX Runtime GenAI's model builder would write, from lossless weights.

Same operators, names, inputs and outputs as the builder's 2-D form: `MatMulNBits`, `GroupQueryAttention` with packed
QKV and its own rotary caches, (Skip)SimplifiedLayerNormalization, and one 8-bit matrix that serves both as embedding
(`GatherBlockQuantized`) and as head. `accuracy_level` is 1: activations stay float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from jaxengine.demo.block_quantised import BLOCK, BlockQuantised, from_q4_1, from_q8_0, stacked
from jaxengine.demo.external_data import ExternalData, external_data
from jaxengine.demo.gguf_reader import GgufModel, LlamaShape, interleaved_to_halves
from jaxengine.demo.progress import Report

WEIGHTS = "Converting"
MODEL_FILE = "model.onnx"

_MASK = "/model/attn_mask_reformat/attn_mask_subgraph"
_IR_VERSION = 10
_OPSETS = (("", 22), ("com.microsoft", 1))


def write_onnx(model: GgufModel, folder: Path, report: Report) -> None:
    """Write `model.onnx` and `model.onnx.data` into `folder`, a layer at a time.

    Raises:
        DemoModelError: a tensor is missing or isn't stored as expected.
    """
    shape = model.shape
    with external_data(folder / f"{MODEL_FILE}.data") as data:
        graph = _Graph(data, shape.rms_epsilon)
        _mask(graph)
        head = from_q8_0(model.tensor("token_embd.weight", "Q8_0"))
        head_names = graph.quantised("lm_head", head)
        hidden = _embedding(graph, head, head_names)
        for name, cache in zip(("cos_cache", "sin_cache"), rotary_caches(shape), strict=True):
            data.add(name, cache)
        normed = graph.first_norm(hidden, _vector(model, "blk.0.attn_norm.weight"))
        residual = hidden
        for layer in range(shape.layers):
            report(WEIGHTS, layer, shape.layers)
            normed, residual = _layer(graph, model, layer, normed, residual)
        graph.matmul("/lm_head/MatMul", head, head_names, normed, "logits")
    proto = helper.make_graph(
        graph.nodes, "main_graph", _inputs(shape), _outputs(shape), initializer=data.initializers
    )
    made = helper.make_model(
        proto,
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in _OPSETS],
        producer_name="jaxengine",
    )
    onnx.save(made, folder / MODEL_FILE)
    report(WEIGHTS, shape.layers, shape.layers)


def rotary_caches(shape: LlamaShape) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, float32 [context_length, head_dim / 2], of position * rope_theta ** (-2i / head_dim).

    Frequencies and angles are rounded to float32, as the builder and transformers round them.
    """
    powers = shape.rope_theta ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    frequencies = np.float32(1) / powers.astype(np.float32)
    angles = np.outer(np.arange(shape.context_length, dtype=np.float32), frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class _Graph:
    """Nodes in the making, named as the builder names them: a node's output is its path plus `/output_0`."""

    def __init__(self, data: ExternalData, epsilon: float) -> None:
        self.nodes: list[NodeProto] = []
        self._data = data
        self._epsilon = epsilon

    def node(
        self,
        op: str,
        path: str,
        inputs: list[str],
        outputs: list[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        outputs = [f"{path}/output_0"] if outputs is None else outputs
        self.nodes.append(helper.make_node(op, inputs, outputs, name=path, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, value: NDArray[np.int64]) -> str:
        output = f"/model/constants/INT64/{name}"
        tensor = onnx.numpy_helper.from_array(value)
        return self.node("Constant", f"/model/constant_nodes/INT64/{name}", [], [output], value=tensor)

    def quantised(self, name: str, weight: BlockQuantised) -> list[str]:
        """Store a matrix; returns the names of codes, scales and, where there are any, zero points."""
        base = f"{name}.MatMul.weight"
        names = [
            self._data.add(f"{base}_Q{weight.bits}", weight.codes),
            self._data.add(f"{base}_scales", weight.scales),
        ]
        if weight.zero_points is not None:
            names.append(self._data.add(f"{base}_zero_points", weight.zero_points))
        return names

    def matmul(
        self, path: str, weight: BlockQuantised, names: list[str], root: str, output: str | None = None
    ) -> str:
        rows, columns = weight.shape
        return self.node(
            "MatMulNBits",
            f"{path}_Q{weight.bits}",
            [root, *names],
            [output or f"{path}/output_0"],
            domain="com.microsoft",
            K=columns,
            N=rows,
            bits=weight.bits,
            block_size=BLOCK,
            accuracy_level=1,
        )

    def linear(self, layer: int, place: str, weight: BlockQuantised, root: str) -> str:
        names = self.quantised(f"model.layers.{layer}.{place.replace('/', '.')}", weight)
        return self.matmul(f"/model/layers.{layer}/{place}/MatMul", weight, names, root)

    def first_norm(self, hidden: str, weight: NDArray[np.float32]) -> str:
        return self.node(
            "SimplifiedLayerNormalization",
            "/model/layers.0/input_layernorm/LayerNorm",
            [hidden, self._data.add("model.layers.0.input_layernorm.weight", weight)],
            ["/model/layers.0/input_layernorm/output_0"],
            epsilon=self._epsilon,
            axis=-1,
            stash_type=1,
        )

    def skip_norm(
        self,
        layer: int,
        name: str,
        residual: str,
        delta: str,
        weight: NDArray[np.float32],
        last: bool = False,
    ) -> tuple[str, str]:
        """RMS norm of residual + delta; returns (normed, the new residual: that sum)."""
        base = f"/model/layers.{layer}/{name}"
        outputs = [f"{base}/output_0"] if last else [f"{base}/output_0", "", "", f"{base}/output_3"]
        stored = self._data.add(f"model.layers.{layer}.{name}.weight", weight)
        normed = self.node(
            "SkipSimplifiedLayerNormalization",
            f"{base}/SkipLayerNorm",
            [residual, delta, stored],
            outputs,
            domain="com.microsoft",
            epsilon=self._epsilon,
        )
        return normed, outputs[-1]


def _mask(graph: _Graph) -> None:
    """From `attention_mask`: last key index of each row (int32 [batch]) and longest length (int32 scalar)."""
    one = graph.constant("[1]", np.array([1], np.int64))
    lengths = graph.node("ReduceSum", f"{_MASK}/ReduceSum", ["attention_mask", one], keepdims=0)
    last = graph.node("Sub", f"{_MASK}/Sub", [lengths, one])
    graph.node("Cast", f"{_MASK}/Sub/Cast", [last], to=TensorProto.INT32)
    mask_shape = graph.node("Shape", f"{_MASK}/Shape", ["attention_mask"])
    axis = graph.constant("1", np.array(1, np.int64))
    longest = graph.node("Gather", f"{_MASK}/Gather", [mask_shape, axis], axis=0)
    graph.node("Cast", f"{_MASK}/Gather/Cast", [longest], to=TensorProto.INT32)


def _embedding(graph: _Graph, head: BlockQuantised, head_names: list[str]) -> str:
    codes, scales = head_names
    flat = graph.constant(f"[{head.shape[0]}, {head.shape[1]}]", np.array(head.shape, np.int64))
    table = graph.node("Reshape", "/model/embed_tokens/Reshape", [codes, flat])
    return graph.node(
        "GatherBlockQuantized",
        "/model/embed_tokens/GatherBlockQuantized",
        [table, "input_ids", scales],
        domain="com.microsoft",
        bits=head.bits,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
    )


def _layer(graph: _Graph, model: GgufModel, layer: int, normed: str, residual: str) -> tuple[str, str]:
    shape = model.shape
    path = f"/model/layers.{layer}"

    def stored(name: str, heads: int | None = None) -> BlockQuantised:
        tensor = model.tensor(f"blk.{layer}.{name}.weight", "Q4_1")
        if heads is not None:
            tensor = tensor.with_rows(interleaved_to_halves(heads, shape.head_dim))
        return from_q4_1(tensor)

    def linear(place: str, weight: BlockQuantised, root: str) -> str:
        return graph.linear(layer, place, weight, root)

    packed = [stored("attn_q", shape.heads), stored("attn_k", shape.kv_heads), stored("attn_v")]
    qkv = linear("attn/qkv_proj", stacked(packed), normed)
    caches = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
    lengths = [f"{_MASK}/Sub/Cast/output_0", f"{_MASK}/Gather/Cast/output_0"]
    attended = graph.node(
        "GroupQueryAttention",
        f"{path}/attn/GroupQueryAttention",
        [qkv, "", "", *caches, *lengths, "cos_cache", "sin_cache"],
        [
            f"{path}/attn/GroupQueryAttention/output_0",
            f"present.{layer}.key",
            f"present.{layer}.value",
        ],
        domain="com.microsoft",
        num_heads=shape.heads,
        kv_num_heads=shape.kv_heads,
        scale=shape.head_dim**-0.5,
        local_window_size=-1,
        softcap=0.0,
        do_rotary=1,
        rotary_interleaved=0,
    )
    delta = linear("attn/o_proj", stored("attn_output"), attended)
    ffn_norm = _vector(model, f"blk.{layer}.ffn_norm.weight")
    normed, residual = graph.skip_norm(layer, "post_attention_layernorm", residual, delta, ffn_norm)
    gate = linear("mlp/gate_proj", stored("ffn_gate"), normed)
    up = linear("mlp/up_proj", stored("ffn_up"), normed)
    sigmoid = graph.node("Sigmoid", f"{path}/mlp/act_fn/Sigmoid", [gate])
    silu = graph.node("Mul", f"{path}/mlp/act_fn/Mul", [gate, sigmoid])
    product = graph.node("Mul", f"{path}/mlp/Mul", [silu, up])
    delta = linear("mlp/down_proj", stored("ffn_down"), product)
    if layer + 1 == shape.layers:
        weight, name = _vector(model, "output_norm.weight"), "final_norm_layernorm"
        return graph.skip_norm(layer + 1, name, residual, delta, weight, last=True)
    weight = _vector(model, f"blk.{layer + 1}.attn_norm.weight")
    return graph.skip_norm(layer + 1, "input_layernorm", residual, delta, weight)


def _vector(model: GgufModel, name: str) -> NDArray[np.float32]:
    return model.tensor(name, "F32").dequantised()


def _inputs(shape: LlamaShape) -> list[ValueInfoProto]:
    tokens = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info(
            "attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]
        ),
    ]
    return tokens + _caches(shape, "past_key_values", "past_sequence_length")


def _outputs(shape: LlamaShape) -> list[ValueInfoProto]:
    logits: list[str | int | None] = ["batch_size", "sequence_length", shape.vocab_size]
    return [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits),
        *_caches(shape, "present", "total_sequence_length"),
    ]


def _caches(shape: LlamaShape, prefix: str, length: str) -> list[ValueInfoProto]:
    dims: list[str | int | None] = ["batch_size", shape.kv_heads, length, shape.head_dim]
    return [
        helper.make_tensor_value_info(f"{prefix}.{layer}.{part}", TensorProto.FLOAT, dims)
        for part in ("key", "value")
        for layer in range(shape.layers)
    ]
