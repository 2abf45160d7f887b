"""Oracles: ONNX Runtime on the same file, a dense causal attention, and edits of a model folder's copy."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime

import onnx_import

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def model(form: str, family: str = "llama") -> Path:
    return MODELS / form / family


def dense_attention(
    spec: onnx_import.AttentionSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Causal attention over the step's own tokens, taken as one sequence from position 0, in float32."""
    group = spec.num_heads // spec.num_kv_heads
    queries, keys, values = (x.astype(jnp.float32) for x in (query, key, value))
    keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
    scores = jnp.einsum("qhd,khd->hqk", queries, keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    tokens = jnp.arange(len(query))
    distance = tokens[:, None] - tokens
    seen = (distance >= 0) & (distance < (len(query) if spec.window is None else spec.window))
    logit = jnp.full(spec.num_heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    logit = jnp.broadcast_to(logit[:, None, None], (*scores.shape[:2], 1))
    scores = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), logit], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :-1]
    return jnp.einsum("hqk,khd->qhd", weights, values).astype(query.dtype), (key, value)


class OneSequence:
    """The fixed states of a step whose tokens are one sequence from its first token on."""

    def window(self, spec: onnx_import.FixedSpec, values: jax.Array) -> tuple[jax.Array, Any]:
        length = spec.shape[1]
        padded = jnp.concatenate([jnp.zeros((length, spec.shape[0]), spec.dtype), values])
        before = jnp.stack([padded[i : i + len(values)] for i in range(length)], axis=2)
        return before, padded[len(values) :].T

    def scan(self, spec: onnx_import.FixedSpec, step: onnx_import.Step, inputs: Any) -> tuple[Any, Any]:
        def one(state: jax.Array, token: Any) -> tuple[jax.Array, Any]:
            after, outputs = step(state[None], jax.tree.map(lambda x: x[None], token))
            return after[0], jax.tree.map(lambda x: x[0], outputs)

        after, outputs = jax.lax.scan(one, jnp.zeros(spec.shape, spec.dtype), inputs)
        return outputs, after


def logits(decoder: onnx_import.Decoder, tokens: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """The decoder's logits of one sequence that grows no longer, at all rows or those given."""
    positions = np.arange(len(tokens), dtype=np.int32)
    rows = positions if rows is None else rows.astype(np.int32)
    limits = np.full(len(tokens), len(tokens), np.int32)
    run = jax.jit(
        lambda params, *args: decoder.apply(
            params, args[0], args[1], dense_attention, args[2], OneSequence(), limits
        )[0]
    )
    return np.asarray(run(decoder.params, tokens.astype(np.int32), positions, rows))


def runtime_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """ONNX Runtime's logits of one sequence on a folder in the 2-D form."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    layers = onnx_import.import_decoder(onnx_import.read_folder(folder)).layers
    feed = {"input_ids": tokens[None].astype(np.int64), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            spec = next(spec for spec in layers if spec.layer == int(value.name.split(".")[1]))
            # A windowed cache has as many slots as the window from the start.
            slots = spec.window or 0 if value.shape[2] == "past_sliding_length" else 0
            feed[value.name] = np.zeros((1, spec.num_kv_heads, slots, spec.head_dim), np.float32)
        elif value.name == "position_ids":
            feed[value.name] = np.arange(len(tokens))[None]
    return session.run(["logits"], feed)[0][0]


def run_node(
    node: onnx.NodeProto, feed: dict[str, np.ndarray], constants: dict[str, np.ndarray], opset: int = 21
) -> np.ndarray:
    """ONNX Runtime's first output of a graph of one node."""
    return run_node_outputs(node, feed, constants, opset)[0]


def run_node_outputs(
    node: onnx.NodeProto, feed: dict[str, np.ndarray], constants: dict[str, np.ndarray], opset: int = 21
) -> list[np.ndarray]:
    """ONNX Runtime's outputs of a graph of one node."""
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_tensor_value_info(name, kinds[name], list(feed[name].shape)) for name in feed],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in node.output],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def edited(source: Path, target: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of a model folder whose graph was changed by `edit`."""
    shutil.copytree(source, target)
    proto = onnx.load(target / "model.onnx", load_external_data=False)
    edit(proto)
    (target / "model.onnx").write_bytes(proto.SerializeToString())
    return target


def node_of(proto: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    """The first node of a type."""
    return next(node for node in proto.graph.node if node.op_type == op_type)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Add or replace a node's attribute."""
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
