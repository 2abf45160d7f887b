"""Attention operators: they split heads, rotate, and hand over to the caller's attention.

GroupQueryAttention and PagedAttention differ only in how they name the past, which the caller owns, so its
inputs (caches, lengths, block tables) are never read and the sub-graph that computes them falls away.
"""

import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.ops.embedding import rotate
from onnx_import.ops.norm import rms_norm
from onnx_import.protocols import AttentionSpec
from onnx_import.registry import INTEGERS, Arguments, Attribute, Call, Environment, Input, Operator, Role


def _heads(call: Call, args: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value as [tokens, heads, head_dim], from three inputs or one packed one."""
    num_heads, num_kv_heads = call.attributes["num_heads"], call.attributes["kv_num_heads"]
    query, key, value = args["query"], args["key"], args["value"]
    rows = query.reshape(-1, query.shape[-1])
    if key is None:
        head_dim = rows.shape[-1] // (num_heads + 2 * num_kv_heads)
        heads = rows.reshape(-1, num_heads + 2 * num_kv_heads, head_dim)
        return heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    head_dim = rows.shape[-1] // num_heads
    return (
        rows.reshape(-1, num_heads, head_dim),
        key.reshape(-1, num_kv_heads, head_dim),
        value.reshape(-1, num_kv_heads, head_dim),
    )


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    query, key, value = _heads(call, args)
    if args["q_norm_weight"] is not None:
        query = rms_norm(query, args["q_norm_weight"], call.attributes["qk_norm_epsilon"])
        key = rms_norm(key, args["k_norm_weight"], call.attributes["qk_norm_epsilon"])
    if call.attributes["do_rotary"]:
        positions = args.get("position_ids")
        positions = env.positions if positions is None else positions.reshape(-1)
        interleaved = bool(call.attributes["rotary_interleaved"])
        query, key = (
            rotate(x, positions, args["cos_cache"], args["sin_cache"], interleaved=interleaved)
            for x in (query, key)
        )
    spec = AttentionSpec(
        layer=call.layer,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        scale=call.attributes["scale"] or 1 / math.sqrt(query.shape[2]),
        kv_dtype=np.dtype(key.dtype),
    )
    output, env.staged[call.layer] = env.attention(spec, query, key, value)
    shape = *args["query"].shape[:-1], query.shape[1] * query.shape[2]
    return output.reshape(shape), None, None


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    inputs = dict(zip(_names(call), call.node.inputs, strict=False))
    num_heads, num_kv_heads = call.attributes["num_heads"], call.attributes["kv_num_heads"]
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        yield f"{call.node.label} has {num_heads} query heads, no multiple of its {num_kv_heads} key heads"
    for pair in (("key", "value"), ("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight")):
        if bool(inputs.get(pair[0])) != bool(inputs.get(pair[1])):
            yield f"{call.node.label} has only one of the inputs {pair[0]!r} and {pair[1]!r}"
    if call.attributes["do_rotary"] and not inputs.get("cos_cache"):
        yield f"{call.node.label} has do_rotary=1 and no 'cos_cache'"


def _names(call: Call) -> tuple[str, ...]:
    rules = _PAGED_INPUTS if call.node.op_type == "PagedAttention" else _GROUPED_INPUTS
    return tuple(rule.name for rule in rules)


def _unread(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, Role.UNREAD) for name in names)


def _refused(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, Role.REFUSED) for name in names)


def _optional(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, optional=True) for name in names)


_GROUPED_INPUTS = (
    Input("query"),
    *_optional("key", "value"),
    *_unread("past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *_optional("cos_cache", "sin_cache"),
    Input("position_ids", optional=True, dtypes=INTEGERS),
    *_refused("attention_bias", "head_sink", "k_scale", "v_scale"),
    *_optional("q_norm_weight", "k_norm_weight"),
    *_refused("query_seqlens"),
)
_PAGED_INPUTS = (
    Input("query"),
    *_optional("key", "value"),
    *_unread("key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table"),
    *_optional("cos_cache", "sin_cache"),
    *_refused("slot_mapping", "head_sink"),
    *_optional("q_norm_weight", "k_norm_weight"),
    *_refused("k_scale", "v_scale"),
    *_unread("attention_metadata"),
)
_SHARED_ATTRIBUTES = {
    "num_heads": Attribute(),
    "kv_num_heads": Attribute(),
    "scale": Attribute(0.0),
    "do_rotary": Attribute(0, only=(0, 1)),
    "rotary_interleaved": Attribute(0, only=(0, 1)),
    "qk_norm_epsilon": Attribute(1e-6),
    "local_window_size": Attribute(-1, only=(-1,)),
    "softcap": Attribute(0.0, only=(0.0,)),
    "k_quant_type": Attribute("NONE", only=("NONE",)),
    "v_quant_type": Attribute("NONE", only=("NONE",)),
}
_GROUPED_ATTRIBUTES = {
    **_SHARED_ATTRIBUTES,
    "causal": Attribute(1, only=(1,)),
    "kv_cache_bit_width": Attribute(0, only=(0,)),
    "qk_output": Attribute(0, only=(0,)),
    "sliding_window_cache": Attribute(0, only=(0,)),
    "smooth_softmax": Attribute(-1, only=(-1, 0)),
}
_PAGED_ATTRIBUTES = {
    **_SHARED_ATTRIBUTES,
    "is_causal": Attribute(1, only=(1,)),
    "kv_cache_layout": Attribute("SEPARATE", only=("SEPARATE",)),
    "k_cache_dtype": Attribute("", only=("",)),
    "v_cache_dtype": Attribute("", only=("",)),
    "rotary_offset": Attribute(0, only=(0,)),
    "v_head_size": Attribute(0, only=(0,)),
}

OPERATORS = tuple(
    Operator("com.microsoft", name, 1, inputs, attributes, _run, caches=(1, 2), check=_check)
    for name, inputs, attributes in (
        ("GroupQueryAttention", _GROUPED_INPUTS, _GROUPED_ATTRIBUTES),
        ("PagedAttention", _PAGED_INPUTS, _PAGED_ATTRIBUTES),
    )
)
