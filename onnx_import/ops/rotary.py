"""The standard domain's RotaryEmbedding, from its ONNX definition; the rotation is that of `embedding.rotate`."""

import jax.numpy as jnp

from onnx_import.ops.embedding import rotate
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


def _run(call: Call, args: Arguments, env: Environment) -> Results:
    """Rotate X [batch, heads, tokens, head_dim] or, with num_heads, [batch, tokens, heads * head_dim].

    The caches are [positions, width / 2] with position_ids [batch, tokens], and [batch, tokens, width / 2], a row
    for each token, without. Raises ValueError when their width isn't the rotated one.
    """
    x = args["X"]
    heads_first = x.ndim == 4
    rows = (
        jnp.moveaxis(x, 1, 2)
        if heads_first
        else x.reshape(*x.shape[:2], call.attributes["num_heads"] or 0, -1)
    )
    batch, tokens, _, head_dim = rows.shape
    width = call.attributes["rotary_embedding_dim"] or head_dim
    caches = args["cos_cache"], args["sin_cache"]
    if any(2 * cache.shape[-1] != width for cache in caches):
        raise ValueError(f"a rotation of {width} elements by caches {[cache.shape for cache in caches]}")
    if args["position_ids"] is None:
        positions = jnp.arange(batch * tokens, dtype=jnp.int32)
        caches = tuple(cache.reshape(batch * tokens, -1) for cache in caches)
    else:
        positions = jnp.broadcast_to(args["position_ids"], (batch, tokens)).reshape(-1)
    interleaved = bool(call.attributes["interleaved"])
    turned = rotate(rows.reshape(batch * tokens, -1, head_dim), positions, *caches, interleaved=interleaved)
    turned = turned.reshape(rows.shape)
    return (jnp.moveaxis(turned, 2, 1) if heads_first else turned.reshape(x.shape),)


OPERATORS = (
    Operator(
        "",
        "RotaryEmbedding",
        23,
        (
            Input("X", dtypes=FLOATING),
            Input("cos_cache", dtypes=FLOATING),
            Input("sin_cache", dtypes=FLOATING),
            Input("position_ids", optional=True, dtypes=INTEGERS),
        ),
        {
            "interleaved": Attribute(0, only=(0, 1)),
            "num_heads": Attribute(0),
            "rotary_embedding_dim": Attribute(0),
        },
        _run,
    ),
)
