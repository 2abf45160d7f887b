"""Rotary position embedding: the rotation itself, and the operator for graphs that rotate outside attention.

Formula of com.microsoft RotaryEmbedding: with c, s the position's rows of the caches, a pair (a, b) becomes
(a c - b s, b c + a s). Pairs are halves of the rotated width, or neighbours when interleaved.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.registry import INTEGERS, Arguments, Attribute, Call, Environment, Input, Operator


def rotate(
    x: jax.Array, positions: jax.Array, cos_cache: jax.Array, sin_cache: jax.Array, *, interleaved: bool
) -> jax.Array:
    """Rotate x [tokens, heads, head_dim] by positions [tokens] with caches [positions, width / 2].

    Only the first `width` of head_dim is rotated. Computed in float32, returned in x's dtype.
    """
    # `fill` turns a position past the cache into NaN, which is noticed, where the default would clamp.
    cos, sin = (
        jnp.take(cache, positions, axis=0, mode="fill")[:, None, :].astype(jnp.float32)
        for cache in (cos_cache, sin_cache)
    )
    half = cos_cache.shape[-1]
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


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    x = args["input"]
    heads = call.attributes["num_heads"]
    rows = x.reshape(-1, heads, x.shape[-1] // heads)
    caches = args["cos_cache"], args["sin_cache"]
    interleaved = bool(call.attributes["interleaved"])
    turned = rotate(rows, args["position_ids"].reshape(-1), *caches, interleaved=interleaved)
    return (turned.reshape(x.shape),)


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    width = call.attributes["rotary_embedding_dim"]
    cache = tensors.get("cos_cache")
    if not call.attributes["num_heads"]:
        # Without it ONNX Runtime takes the cache's width for the head size; a packed row can't tell.
        yield f"{call.node.label} lacks the attribute 'num_heads'"
    if width and cache is not None and width != 2 * cache.shape[-1]:
        yield f"{call.node.label} has rotary_embedding_dim={width}, but cos_cache holds {2 * cache.shape[-1]}"


OPERATORS = (
    Operator(
        "com.microsoft",
        "RotaryEmbedding",
        1,
        (Input("input"), Input("position_ids", dtypes=INTEGERS), Input("cos_cache"), Input("sin_cache")),
        {
            "interleaved": Attribute(0, only=(0, 1)),
            "num_heads": Attribute(0),
            "rotary_embedding_dim": Attribute(0),
            "is_packed_batching": Attribute(0, only=(0, 1)),
            "scale": Attribute(1.0, only=(1.0,)),
        },
        _run,
        check=_check,
    ),
)
