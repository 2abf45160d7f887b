"""Rotary position embedding: the rotation itself, and the operator for graphs that rotate outside attention.

Formula of com.microsoft RotaryEmbedding: with c, s the position's rows of the caches, a pair (a, b) becomes
(a c - b s, b c + a s). Pairs are halves of the rotated width, or neighbours when interleaved.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onnx_import import length_choice
from onnx_import.graph import Tensor
from onnx_import.registry import INTEGERS, Arguments, Attribute, Call, Environment, Input, Operator


class TableByLength(NamedTuple):
    """Two rotary tables [positions, width / 2] and bool[tokens], true for the tokens that take the long one."""

    long: jax.Array
    short: jax.Array
    takes_long: jax.Array


def rotate(
    x: jax.Array,
    positions: jax.Array,
    cos_cache: jax.Array | TableByLength,
    sin_cache: jax.Array | TableByLength,
    *,
    interleaved: bool,
) -> jax.Array:
    """Rotate x [tokens, heads, head_dim] by positions [tokens] with caches [positions, width / 2].

    Only the first `width` of head_dim is rotated. Computed in float32, returned in x's dtype.
    """
    cos, sin = (
        _look_up(cache, positions)[:, None, :].astype(jnp.float32) for cache in (cos_cache, sin_cache)
    )
    half = cos.shape[-1]
    turned, kept = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(pair, axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), kept), axis=-1)


def _look_up(cache: jax.Array | TableByLength, positions: jax.Array) -> jax.Array:
    if isinstance(cache, TableByLength):
        long, short = (_look_up(table, positions) for table in (cache.long, cache.short))
        return jnp.where(cache.takes_long[:, None], long, short)
    # `fill` turns a position past the cache into NaN, which is noticed, where the default would clamp.
    return jnp.take(cache, positions, axis=0, mode="fill")


def _takes_long(call: Call, env: Environment) -> jax.Array:
    """bool[tokens], chosen for each token by its sequence's limit.

    The definition takes the long factors once a sequence holds more than `threshold` tokens. Its first keys are
    rotated and stored by then, so a sequence that may come to hold more takes them from its first token on, and a
    choice depends on nothing but the token's own sequence.
    """
    if env.limits is None:
        raise ValueError("the graph chooses rotary tables by length, so `limits` must be given")
    return env.limits > call.attributes["threshold"]


def _choose(call: Call, args: Arguments, env: Environment) -> tuple[Any, ...]:
    takes_long = _takes_long(call, env)
    tables = [args[rule.name] for rule in _TABLES[: len(call.node.inputs)]]
    return tuple(
        TableByLength(long, short, takes_long) for long, short in zip(tables[::2], tables[1::2], strict=True)
    )


def _move(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    positions = args["position_ids"]
    return (jnp.where(_takes_long(call, env), positions + call.attributes["threshold"], positions),)


def _check_choice(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    threshold = call.attributes["threshold"]
    for long, short in zip(*[iter(tensors.values())] * 2, strict=True):
        if len(long.shape) != 2 or long.shape[1:] != short.shape[1:] or short.shape[0] < threshold:
            yield (
                f"{call.node.label} chooses at {threshold} tokens between tables of shape "
                f"{long.shape} and {short.shape}, which isn't supported"
            )


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    x, caches = args["input"], (args["cos_cache"], args["sin_cache"])
    if x.ndim == 4:
        rows = x[0].transpose(1, 0, 2)
    else:
        # Without a number of heads the cache is as wide as a head.
        width = x.shape[-1] // (call.attributes["num_heads"] or x.shape[-1] // (2 * _width(caches[0])))
        rows = x.reshape(-1, x.shape[-1] // width, width)
    # The three streams of M-RoPE are one for text: each row gives the same angles.
    positions = args["position_ids"].reshape(-1, rows.shape[0])[0]
    turned = rotate(rows, positions, *caches, interleaved=bool(call.attributes["interleaved"]))
    return (turned.transpose(1, 0, 2)[None] if x.ndim == 4 else turned.reshape(x.shape),)


def _width(cache: jax.Array | TableByLength) -> int:
    return cache.long.shape[-1] if isinstance(cache, TableByLength) else cache.shape[-1]


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    width = call.attributes["rotary_embedding_dim"]
    cache = tensors.get("cos_cache")
    if width and not call.attributes["num_heads"]:
        yield f"{call.node.label} has rotary_embedding_dim={width} and lacks the attribute 'num_heads'"
    if width and cache is not None and width != 2 * cache.shape[-1]:
        yield f"{call.node.label} has rotary_embedding_dim={width}, but cos_cache holds {2 * cache.shape[-1]}"


_TABLES = tuple(
    Input(f"{name}_{kind}", optional=name == "second")
    for name in ("first", "second")
    for kind in ("long", "short")
)

_INPUTS = (
    Input("input"),
    Input("position_ids", dtypes=INTEGERS),
    Input("cos_cache"),
    Input("sin_cache"),
)
_ATTRIBUTES = {
    "interleaved": Attribute(0, only=(0, 1)),
    "num_heads": Attribute(0),
    "rotary_embedding_dim": Attribute(0),
    "is_packed_batching": Attribute(0, only=(0, 1)),
    "scale": Attribute(1.0, only=(1.0,)),
}

OPERATORS = (
    Operator(
        length_choice.DOMAIN,
        length_choice.TABLES,
        1,
        _TABLES,
        {"threshold": Attribute()},
        _choose,
        outputs=(0, 1),
        check=_check_choice,
    ),
    Operator(
        length_choice.DOMAIN,
        length_choice.POSITIONS,
        1,
        (Input("position_ids", dtypes=INTEGERS),),
        {"threshold": Attribute()},
        _move,
    ),
    Operator("com.microsoft", "RotaryEmbedding", 1, _INPUTS, _ATTRIBUTES, _run, check=_check),
    Operator(
        "com.microsoft",
        "MRotaryEmbedding",
        1,
        _INPUTS,
        # Which stream fills which part of a row says nothing where all streams are one.
        {**_ATTRIBUTES, "mrope_section": Attribute(of=list), "mrope_layout": Attribute(0, only=(0, 1))},
        _run,
        check=_check,
    ),
)
