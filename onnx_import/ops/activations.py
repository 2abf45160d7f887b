"""Gelu and its kin of the com.microsoft domain: element-wise, computed in float32, returned in the input's type.

Formulas of ONNX Runtime's contrib operators: Gelu is x Φ(x) with the normal distribution's Φ, FastGelu replaces Φ by a
tanh, QuickGelu is x sigmoid(alpha x). A bias of shape [width] is added before.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from onnx_import.registry import Arguments, Attribute, Call, Environment, Input, Operator

Function = Callable[[jax.Array], jax.Array]


def gelu(x: jax.Array) -> jax.Array:
    """x (1 + erf(x / sqrt(2))) / 2, of any shape."""
    return jax.nn.gelu(x, approximate=False)


def fast_gelu(x: jax.Array) -> jax.Array:
    """x (1 + tanh(0.797885 x + 0.035677 x**3)) / 2, of any shape."""
    return jax.nn.gelu(x, approximate=True)


def in_float32(function: Function, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """function(x + bias) for x [..., width] and bias [width], computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    if bias is not None:
        wide = wide + bias.astype(jnp.float32)
    return function(wide).astype(x.dtype)


def _operator(op_type: str, function: Function, *inputs: Input) -> Operator:
    first = inputs[0].name
    bias = inputs[1].name if len(inputs) > 1 else None

    def run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
        return (in_float32(function, args[first], args[bias] if bias else None),)

    return Operator("com.microsoft", op_type, 1, inputs, {}, run)


def _quick_gelu(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    alpha = call.attributes["alpha"]
    return (in_float32(lambda x: x * jax.nn.sigmoid(alpha * x), args["X"]),)


OPERATORS = (
    _operator("Gelu", gelu, Input("X")),
    _operator("BiasGelu", gelu, Input("A"), Input("B")),
    _operator("FastGelu", fast_gelu, Input("X"), Input("bias", optional=True)),
    Operator("com.microsoft", "QuickGelu", 1, (Input("X"),), {"alpha": Attribute(1.702)}, _quick_gelu),
)
