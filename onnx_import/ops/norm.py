"""Root-mean-square normalisations, computed in float32 whatever the activations' type."""

import jax
import jax.numpy as jnp

from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator

MIN_ROWS = 8
"""XLA on CPU sums a row in another order when the reduction has fewer rows than this."""


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x**2) + epsilon) * scale over the last axis, in x's dtype and shape."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    count = rows.shape[0]
    if count < MIN_ROWS:
        rows = jnp.pad(rows, ((0, MIN_ROWS - count), (0, 0)))
    mean = jnp.mean(jnp.square(rows), axis=-1, keepdims=True)
    normal = rows * jax.lax.rsqrt(mean + epsilon) * scale.astype(jnp.float32)
    return normal[:count].astype(x.dtype).reshape(x.shape)


def _simplified(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    return (rms_norm(args["X"], args["scale"], call.attributes["epsilon"]),)


def _skip_simplified(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    total = args["input"] + args["skip"]
    if args["bias"] is not None:
        total = total + args["bias"]
    return rms_norm(total, args["gamma"], call.attributes["epsilon"]), None, None, total


OPERATORS = (
    Operator(
        "", "SimplifiedLayerNormalization", 1, (Input("X"), Input("scale")),
        {"epsilon": Attribute(1e-5), "axis": Attribute(-1, only=(-1,)), "stash_type": Attribute(1, only=(1,))},
        _simplified,
    ),
    Operator(
        "com.microsoft", "SkipSimplifiedLayerNormalization", 1,
        (Input("input"), Input("skip"), Input("gamma"), Input("bias", optional=True)),
        {"epsilon": Attribute(1e-12)}, _skip_simplified, outputs=(0, 3),
    ),
)
