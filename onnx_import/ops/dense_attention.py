"""The standard domain's Attention as a plain function of its inputs, from its ONNX definition (opsets 23 to 25).

This is the operator standing alone: every key is an input. It owns no past and calls no engine. A decoder whose node
carries past_key and past_value, or keys from a TensorScatter, wants the caller's attention instead; that binding is
a different operator, which takes this one's place in the registry's table.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from onnx_import.graph import Tensor
from onnx_import.ops.elementwise import CAST_TARGETS
from onnx_import.ops.reductions import sum_axes
from onnx_import.registry import (
    FLOATING,
    INTEGERS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Results,
)

_HIGHEST = jax.lax.Precision.HIGHEST


def _heads(x: jax.Array, heads: int | None) -> jax.Array:
    """[batch, heads, tokens, head_dim], from that or from [batch, tokens, heads * head_dim]."""
    return x if x.ndim == 4 else jnp.moveaxis(x.reshape(*x.shape[:2], heads or 0, -1), 2, 1)


def attention_bias(
    shape: tuple[int, int, int],
    mask: jax.Array | None,
    attributes: Mapping[str, Any],
    past: int,
    lengths: jax.Array | None,
) -> jax.Array:
    """What is added to the scores: float32, broadcastable to [batch, heads, queries, keys]; -inf forbids.

    `shape` is (batch, queries, keys), `past` the number of keys before the first query's own, `lengths` int [batch]
    the number of valid keys of each row, the queries' own last, or None where all are.
    """
    batch, queries, keys = shape
    first = jnp.asarray(past, jnp.int32) if lengths is None else lengths.reshape(batch, 1, 1, 1) - queries
    distance = first + jnp.arange(queries, dtype=jnp.int32)[:, None] - jnp.arange(keys, dtype=jnp.int32)
    allowed = jnp.ones(distance.shape, bool)
    if attributes["is_causal"]:
        allowed &= distance >= 0
    if attributes.get("left_window_size", -1) >= 0:
        allowed &= distance <= attributes["left_window_size"]
    if attributes.get("right_window_size", -1) >= 0:
        allowed &= -distance <= attributes["right_window_size"]
    if lengths is not None:
        allowed &= jnp.arange(keys, dtype=jnp.int32) < lengths.reshape(batch, 1, 1, 1)
    bias = jnp.where(allowed, jnp.float32(0), -jnp.inf)
    if mask is None:
        return bias
    if mask.dtype == jnp.bool_:
        mask = jnp.where(mask, jnp.float32(0), -jnp.inf)
    missing = keys - mask.shape[-1]
    if missing > 0:
        widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
        mask = jnp.pad(mask, widths, constant_values=-np.inf)
    return bias + mask.astype(jnp.float32)


def _run(call: Call, args: Arguments, env: Environment) -> Results:
    """Y, present_key, present_value and the scores that qk_matmul_output_mode asks for.

    Q is [batch, q_heads, queries, head_dim], K and V [batch, kv_heads, keys, head_dim] and [..., v_head_dim], or all
    three [batch, tokens, heads * head_dim]; the past is of K's and V's 4-D form and comes before them. attn_mask
    broadcasts to [batch, q_heads, queries, keys] from the right, and lacks keys that are forbidden. A query
    without a key gives zeros. Computed in float32, softmax in softmax_precision where given.
    """
    attributes = call.attributes
    query, key, value = (
        _heads(args[name], attributes[heads])
        for name, heads in (("Q", "q_num_heads"), ("K", "kv_num_heads"), ("V", "kv_num_heads"))
    )
    past = 0
    if args["past_key"] is not None:
        past = args["past_key"].shape[2]
        key = jnp.concatenate((args["past_key"], key), axis=2)
        value = jnp.concatenate((args["past_value"], value), axis=2)
    batch, heads, queries, head_dim = query.shape
    group = heads // key.shape[1]
    scale = attributes["scale"]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        wide = jnp.repeat(right.astype(jnp.float32), group, axis=1)
        return jnp.einsum(equation, left.astype(jnp.float32), wide, precision=_HIGHEST)

    scores = [product("bhqd,bhkd->bhqk", query, key) * scale]
    cap = attributes["softcap"]
    scores.append(jnp.tanh(scores[0] / cap) * cap if cap else scores[0])
    shape = (batch, queries, key.shape[2])
    scores.append(
        scores[1] + attention_bias(shape, args["attn_mask"], attributes, past, args.get("nonpad_kv_seqlen"))
    )
    scores.append(_weights(scores[2], attributes["softmax_precision"]))
    output = product("bhqk,bhkd->bhqd", scores[3], value).astype(query.dtype)
    if args["Q"].ndim == 3:
        output = jnp.moveaxis(output, 1, 2).reshape(batch, queries, -1)
    return output, key, value, scores[attributes["qk_matmul_output_mode"]].astype(query.dtype)


def _weights(scores: jax.Array, precision: int | None) -> jax.Array:
    """Softmax over the keys in float32, from scores rounded to the asked type; zeros where every key is forbidden."""
    if precision is not None:
        scores = scores.astype(CAST_TARGETS[precision]).astype(jnp.float32)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
    total = sum_axes(weights, (3,))
    return weights / jnp.where(total == 0, 1, total)


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    present = {rule.name for rule, name in zip(_INPUTS, call.node.inputs, strict=False) if name}
    if ("past_key" in present) != ("past_value" in present):
        yield f"{call.node.label} has only one of the inputs 'past_key' and 'past_value'"
    if {"past_key", "nonpad_kv_seqlen"} <= present:
        yield f"{call.node.label} has both a past and 'nonpad_kv_seqlen'"
    for name in ("left_window_size", "right_window_size"):
        if call.attributes.get(name, -1) < -1:
            yield f"{call.node.label} has {name}={call.attributes[name]}, which isn't supported"


_INPUTS = (
    Input("Q", dtypes=FLOATING),
    Input("K", dtypes=FLOATING),
    Input("V", dtypes=FLOATING),
    Input("attn_mask", optional=True, dtypes=FLOATING | frozenset(("bool",))),
    Input("past_key", optional=True, dtypes=FLOATING),
    Input("past_value", optional=True, dtypes=FLOATING),
    Input("nonpad_kv_seqlen", optional=True, dtypes=INTEGERS),
)
_ATTRIBUTES = {
    "is_causal": Attribute(0, only=(0, 1)),
    "q_num_heads": Attribute(None),
    "kv_num_heads": Attribute(None),
    "qk_matmul_output_mode": Attribute(0, only=(0, 1, 2, 3)),
    "scale": Attribute(None, of=float),
    "softcap": Attribute(0.0),
    "softmax_precision": Attribute(
        None, only=(None, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    ),
}
_WINDOWS = {"left_window_size": Attribute(-1), "right_window_size": Attribute(-1)}

OPERATORS = (
    Operator("", "Attention", 23, _INPUTS[:6], _ATTRIBUTES, _run, outputs=(0, 1, 2, 3), check=_check),
    Operator("", "Attention", 24, _INPUTS, _ATTRIBUTES, _run, outputs=(0, 1, 2, 3), check=_check),
    Operator(
        "", "Attention", 25, _INPUTS, {**_ATTRIBUTES, **_WINDOWS}, _run, outputs=(0, 1, 2, 3), check=_check
    ),
)
