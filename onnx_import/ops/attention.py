"""Attention operators: they split heads, rotate, and hand over to the caller's attention.

GroupQueryAttention and PagedAttention differ only in how they name the past, which the caller owns, so its
inputs (caches, lengths, block tables) are never read and the sub-graph that computes them falls away. That holds for
a windowed cache (sliding_window_cache, block_table_windowed) too: what it no longer holds, no query sees.
"""

import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.ops.embedding import rotate
from onnx_import.ops.norm import rms_norm
from onnx_import.protocols import AttentionSpec
from onnx_import.registry import INTEGERS, Arguments, Attribute, Call, Environment, Input, Operator, Role

_NO_LIMIT = 2**31 - 1
"""Positions are 32-bit integers, so a longer window hides nothing."""


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


def attend(
    call: Call,
    env: Environment,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Hand heads [tokens, heads, head_dim] to the caller's attention; a scale of 0 means 1 / sqrt(head_dim).

    Returns its output as [tokens, num_heads * head_dim] and keeps what it staged for the call's layer. Raises
    ValueError where the shapes of the heads don't fit.
    """
    if key.shape != value.shape or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"heads of query, key and value are {query.shape[1:]}, {key.shape[1:]} and {value.shape[1:]}, "
            "which isn't supported"
        )
    spec = AttentionSpec(
        layer=call.layer,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        scale=scale or 1 / math.sqrt(query.shape[2]),
        kv_dtype=np.dtype(key.dtype),
        window=window,
        softcap=softcap,
    )
    # An attention of layers without sinks needs no parameter for them.
    extra = () if sinks is None else (sinks,)
    output, env.staged[call.layer] = env.attention(spec, query, key, value, *extra)
    return output.reshape(query.shape[0], -1)


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    query, key, value = _heads(call, args)
    attributes = call.attributes
    if args["q_norm_weight"] is not None:
        shared = attributes["qk_norm_epsilon"]
        query = rms_norm(query, args["q_norm_weight"], attributes.get("q_norm_epsilon") or shared)
        key = rms_norm(key, args["k_norm_weight"], attributes.get("k_norm_epsilon") or shared)
    if attributes["do_rotary"]:
        positions = args.get("position_ids")
        positions = env.positions if positions is None else positions.reshape(-1)
        interleaved = bool(attributes["rotary_interleaved"])
        query, key = (
            rotate(x, positions, args["cos_cache"], args["sin_cache"], interleaved=interleaved)
            for x in (query, key)
        )
    sinks = args["head_sink"]
    if sinks is None and attributes.get("smooth_softmax") == 1:
        sinks = jnp.zeros(query.shape[1], jnp.float32)
    window = attributes["local_window_size"]
    output = attend(
        call,
        env,
        query,
        key,
        value,
        scale=attributes["scale"],
        window=None if window == -1 else min(window, _NO_LIMIT),
        softcap=attributes["softcap"] or None,
        sinks=sinks,
    )
    return output.reshape(*args["query"].shape[:-1], -1), None, None


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    attributes = call.attributes
    inputs = dict(zip(_names(call), call.node.inputs, strict=False))
    num_heads, num_kv_heads, window = (
        attributes[name] for name in ("num_heads", "kv_num_heads", "local_window_size")
    )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        yield f"{call.node.label} has {num_heads} query heads, no multiple of its {num_kv_heads} key heads"
    for pair in (("key", "value"), ("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight")):
        if bool(inputs.get(pair[0])) != bool(inputs.get(pair[1])):
            yield f"{call.node.label} has only one of the inputs {pair[0]!r} and {pair[1]!r}"
    if attributes["do_rotary"] and not inputs.get("cos_cache"):
        yield f"{call.node.label} has do_rotary=1 and no 'cos_cache'"
    if window != -1 and window < 1:
        yield f"{call.node.label} has local_window_size={window}, which is neither -1 nor a number of keys"
    if attributes.get("sliding_window_cache") and window == -1:
        yield f"{call.node.label} has sliding_window_cache=1 and no 'local_window_size'"
    if attributes["softcap"] < 0:
        yield f"{call.node.label} has softcap={attributes['softcap']}, which isn't supported"
    sinks = tensors.get("head_sink")
    if sinks is not None and sinks.shape != (num_heads,):
        yield f"{call.node.label} has a 'head_sink' of shape {sinks.shape} for its {num_heads} heads"


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
    *_refused("attention_bias"),
    *_optional("head_sink"),
    *_refused("k_scale", "v_scale"),
    *_optional("q_norm_weight", "k_norm_weight"),
    *_refused("query_seqlens"),
)
_PAGED_INPUTS = (
    Input("query"),
    *_optional("key", "value"),
    *_unread("key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table"),
    *_optional("cos_cache", "sin_cache"),
    *_refused("slot_mapping"),
    *_optional("head_sink", "q_norm_weight", "k_norm_weight"),
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
    "local_window_size": Attribute(-1),
    "softcap": Attribute(0.0),
    "k_quant_type": Attribute("NONE", only=("NONE",)),
    "v_quant_type": Attribute("NONE", only=("NONE",)),
}
_GROUPED_ATTRIBUTES = {
    **_SHARED_ATTRIBUTES,
    "causal": Attribute(1, only=(1,)),
    "kv_cache_bit_width": Attribute(0, only=(0,)),
    "qk_output": Attribute(0, only=(0,)),
    "q_norm_epsilon": Attribute(None, of=float),
    "k_norm_epsilon": Attribute(None, of=float),
    "sliding_window_cache": Attribute(0, only=(0, 1)),
    "smooth_softmax": Attribute(-1, only=(-1, 0, 1)),
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
    Operator("com.microsoft", name, 1, inputs, attributes, _run, caches=(1, 2), key_cache=3, check=_check)
    for name, inputs, attributes in (
        ("GroupQueryAttention", _GROUPED_INPUTS, _GROUPED_ATTRIBUTES),
        ("PagedAttention", _PAGED_INPUTS, _PAGED_ATTRIBUTES),
    )
)
