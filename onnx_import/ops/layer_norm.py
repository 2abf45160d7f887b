"""Layer normalisation fused with what comes before it: a residual sum, or the embedding of tokens and positions.

Formula: (x - mean(x)) / sqrt(mean((x - mean(x))**2) + epsilon) * gamma + beta over the last axis, in float32.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.ops.norm import sum_last
from onnx_import.registry import INTEGERS, Arguments, Attribute, Call, Environment, Input, Operator, Role


def layer_norm(x: jax.Array, gamma: jax.Array, beta: jax.Array | None, epsilon: float) -> jax.Array:
    """Normalise x [..., width] with gamma and beta [width], in x's dtype; a row's bits don't depend on the rows."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    centred = rows - sum_last(rows) / x.shape[-1]
    variance = sum_last(jnp.square(centred)) / x.shape[-1]
    normal = centred * jax.lax.rsqrt(variance + epsilon) * gamma.astype(jnp.float32)
    if beta is not None:
        normal = normal + beta.astype(jnp.float32)
    return normal.astype(x.dtype).reshape(x.shape)


def _skip(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    total = args["input"] + args["skip"]
    if args["bias"] is not None:
        total = total + args["bias"]
    return layer_norm(total, args["gamma"], args["beta"], call.attributes["epsilon"]), None, None, total


def _skip_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name in ("input", "skip"):
        if name in tensors:
            # A constant holds a row for each place in the sequence, which packed tokens don't have.
            yield f"{call.node.label} has a constant for its {name!r}, which isn't supported"


def _embed(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    tokens, positions = args["input_ids"], args["position_ids"]
    positions = env.positions.reshape(tokens.shape) if positions is None else positions
    # `fill` makes an id past a table a row of NaN, which is noticed, where the default would clamp.
    words, places = (
        jnp.take(args[name], ids, axis=0, mode="fill")
        for name, ids in (("word_embedding", tokens), ("position_embedding", positions))
    )
    total = words + places
    # Without a mask ONNX Runtime counts no masked words either; attention has lengths of its own.
    mask_index = jnp.zeros(tokens.shape[:1], jnp.int32)
    normal = layer_norm(total, args["gamma"], args["beta"], call.attributes["epsilon"])
    return normal, mask_index, total


OPERATORS = (
    Operator(
        "com.microsoft",
        "SkipLayerNormalization",
        1,
        (
            Input("input"),
            Input("skip"),
            Input("gamma"),
            Input("beta", optional=True),
            Input("bias", optional=True),
        ),
        {"epsilon": Attribute(1e-12)},
        _skip,
        outputs=(0, 3),
        check=_skip_check,
    ),
    Operator(
        "com.microsoft",
        "EmbedLayerNormalization",
        1,
        (
            Input("input_ids", dtypes=INTEGERS),
            Input("segment_ids", Role.REFUSED),
            Input("word_embedding"),
            Input("position_embedding"),
            Input("segment_embedding", Role.REFUSED),
            Input("gamma"),
            Input("beta"),
            Input("mask", Role.REFUSED),
            Input("position_ids", optional=True, dtypes=INTEGERS),
        ),
        {"epsilon": Attribute(1e-12), "mask_index_type": Attribute(0, only=(0, 1))},
        _embed,
        outputs=(0, 1, 2),
    ),
)
