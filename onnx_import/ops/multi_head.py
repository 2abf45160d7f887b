"""Attention operators of older exports, with as many key heads as query heads, mapped to the caller's attention.

com.microsoft MultiHeadAttention takes projected heads, com.microsoft Attention projects them itself. Both must be
causal. Masks that only hide padding are gone before these operators are checked (see masks.py).
"""

from collections.abc import Iterator, Mapping

import jax

from onnx_import.graph import Tensor
from onnx_import.ops.attention import attend
from onnx_import.ops.matmul import contract, dense_struct, dense_weight
from onnx_import.registry import (
    INTEGERS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
    WeightPlan,
)

_ATTRIBUTES = {
    "num_heads": Attribute(),
    "scale": Attribute(0.0),
    "unidirectional": Attribute(0),
    "mask_filter_value": Attribute(-10000.0),
}


def _heads(x: jax.Array, num_heads: int) -> jax.Array:
    return x.reshape(-1, num_heads, x.shape[-1] // num_heads)


def _multi_head(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    projected = [args[name] for name in ("query", "key", "value")]
    if any(x.ndim != 3 for x in projected):
        raise ValueError("only query, key and value of rank 3 are supported, not packed or projected ones")
    if args["bias"] is not None:
        width = args["bias"].shape[0] // 3
        projected = [x + args["bias"][i * width : (i + 1) * width] for i, x in enumerate(projected)]
    query, key, value = (_heads(x, call.attributes["num_heads"]) for x in projected)
    output = attend(call, env, query, key, value, scale=call.attributes["scale"])
    return output.reshape(args["query"].shape), None, None


def _fused(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    projected = contract(args["input"], args["weights"])
    if args["bias"] is not None:
        projected = projected + args["bias"]
    heads = call.attributes["num_heads"]
    rows = _heads(projected, 3 * heads)
    query, key, value = (rows[:, i * heads : (i + 1) * heads] for i in range(3))
    output = attend(call, env, query, key, value, scale=call.attributes["scale"])
    return output.reshape(*projected.shape[:-1], -1), None


def _weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    tensor = tensors["weights"].transpose()
    rows, columns = tensor.shape
    struct = dense_struct(rows, columns, tensor.dtype)
    return {"weights": WeightPlan(f"{tensor.key}:dense", struct, (tensor,), dense_weight)}


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if call.attributes["unidirectional"] != 1:
        yield f"{call.node.label} has unidirectional=0, which isn't supported in a decoder"


def _check_fused(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    yield from _check(call, tensors)
    sizes, shape = call.attributes["qkv_hidden_sizes"], tensors["weights"].shape
    if len(shape) != 2 or shape[1] % (3 * call.attributes["num_heads"]):
        yield f"{call.node.label} has weights of shape {shape}, no three widths of {call.attributes['num_heads']} heads"
    elif sizes and list(sizes) != [shape[1] // 3] * 3:
        yield f"{call.node.label} has qkv_hidden_sizes={list(sizes)}, which isn't supported"


def _refused(*names: str) -> tuple[Input, ...]:
    return tuple(Input(name, Role.REFUSED) for name in names)


OPERATORS = (
    Operator(
        "com.microsoft",
        "MultiHeadAttention",
        1,
        (
            *(Input(name) for name in ("query", "key", "value")),
            Input("bias", optional=True),
            *_refused("key_padding_mask", "attention_bias"),
            *(Input(name, Role.UNREAD) for name in ("past_key", "past_value", "past_sequence_length")),
            *_refused("cache_indirection"),
        ),
        _ATTRIBUTES,
        _multi_head,
        caches=(1, 2),
        key_cache=6,
        check=_check,
    ),
    Operator(
        "com.microsoft",
        "Attention",
        1,
        (
            Input("input"),
            Input("weights", Role.WEIGHT),
            Input("bias", optional=True),
            *_refused("mask_index"),
            Input("past", Role.UNREAD),
            *_refused("attention_bias"),
            Input("past_sequence_length", Role.UNREAD, dtypes=INTEGERS),
        ),
        {
            **_ATTRIBUTES,
            "do_rotary": Attribute(0, only=(0,)),
            "rotary_embedding_dim": Attribute(0),
            "past_present_share_buffer": Attribute(0),
            "qkv_hidden_sizes": Attribute(None, of=list),
        },
        _fused,
        caches=(1,),
        key_cache=4,
        weights=_weights,
        check=_check_fused,
    ),
)
