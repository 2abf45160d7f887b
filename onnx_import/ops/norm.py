"""Root-mean-square normalisations, computed in float32 whatever the activations' type."""

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator

_COLUMNS = 8
"""Equal columns of the summing product: with one, XLA takes its matrix-vector path, which isn't exact either."""


def sum_last(x: jax.Array) -> jax.Array:
    """Sum x float32 [rows, width] over its last axis, keeping it: [rows, 1], a row's bits independent of rows.

    XLA on CPU picks a reduction's order of adding from the whole shape: for widths 16, 64 and 100 a row's sum
    changes in the last bit with the number of rows, up to hundreds of them (576 and up held from 8 rows
    on). A matrix product with ones costs the same and kept its bits for every width and count tried.
    """
    ones = np.ones((_COLUMNS, x.shape[-1]), np.float32)
    return jax.lax.dot_general(x, ones, (((1,), (1,)), ((), ())))[:, :1]


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Compute x / sqrt(mean(x**2) + epsilon) * scale over the last axis, in x's dtype and shape."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    mean = sum_last(jnp.square(rows)) / x.shape[-1]
    normal = rows * jax.lax.rsqrt(mean + epsilon) * scale.astype(jnp.float32)
    return normal.astype(x.dtype).reshape(x.shape)


def _simplified(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    return (rms_norm(args["X"], args["scale"], call.attributes["epsilon"]),)


def _skip_simplified(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array | None, ...]:
    total = args["input"] + args["skip"]
    if args["bias"] is not None:
        total = total + args["bias"]
    return rms_norm(total, args["gamma"], call.attributes["epsilon"]), None, None, total


OPERATORS = (
    Operator(
        "",
        "SimplifiedLayerNormalization",
        1,
        (Input("X"), Input("scale")),
        {
            "epsilon": Attribute(1e-5),
            "axis": Attribute(-1, only=(-1,)),
            "stash_type": Attribute(1, only=(1,)),
        },
        _simplified,
    ),
    Operator(
        "com.microsoft",
        "SkipSimplifiedLayerNormalization",
        1,
        (Input("input"), Input("skip"), Input("gamma"), Input("bias", optional=True)),
        {"epsilon": Attribute(1e-12)},
        _skip_simplified,
        outputs=(0, 3),
    ),
)
