"""Element-wise operators of the standard domain: arithmetic, functions, comparisons, choices and casts.

Inputs broadcast as in NumPy; the output has the broadcast shape. Floats narrower than float32 are computed in
float32 by functions that lose digits in them, and returned in their own type.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx

from onnx_import.registry import (
    FLOATING,
    NUMBERS,
    TENSORS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Results,
)

CAST_TARGETS: dict[int, np.dtype] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    # Token counts and positions fit 32 bits, and JAX has no 64-bit integers by default.
    onnx.TensorProto.INT64: np.dtype(np.int32),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    onnx.TensorProto.INT16: np.dtype(np.int16),
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
    onnx.TensorProto.UINT16: np.dtype(np.uint16),
    onnx.TensorProto.UINT32: np.dtype(np.uint32),
    onnx.TensorProto.BOOL: np.dtype(np.bool_),
}
# Both matter for 8-bit floats alone, which no value here has.
_SATURATE = {"saturate": Attribute(1, only=(0, 1))}
_ROUND = {**_SATURATE, "round_mode": Attribute("up", only=("up", "down", "nearest"))}


def in_float32(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The function computed in float32 and returned in the input's type."""
    return lambda x: function(x.astype(jnp.float32)).astype(x.dtype)


def _operator(
    op_type: str,
    since: int,
    inputs: tuple[Input, ...],
    function: Callable[..., Any],
    attributes: dict[str, Attribute] | None = None,
) -> Operator:
    """An operator whose function takes the present inputs in order and the attributes by name: one output."""

    def run(call: Call, args: Arguments, env: Environment) -> Results:
        return (function(*(args[rule.name] for rule in operator.inputs_of(call.node)), **call.attributes),)

    operator = Operator("", op_type, since, inputs, attributes or {}, run)
    return operator


def _unary(
    op_type: str, since: int, function: Callable[..., Any], attributes: dict[str, Attribute] | None = None
) -> Operator:
    return _operator(op_type, since, (Input("X", dtypes=TENSORS),), function, attributes)


def _binary(op_type: str, since: int, function: Callable[..., Any]) -> Operator:
    return _operator(op_type, since, (Input("A", dtypes=TENSORS), Input("B", dtypes=TENSORS)), function)


def _variadic(op_type: str, since: int, function: Callable[..., Any]) -> Operator:
    inputs = (Input("data", dtypes=NUMBERS, variadic=True),)
    return _operator(op_type, since, inputs, lambda *arrays: reduce(function, arrays))


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Quotient, for integers cut towards zero."""
    return (
        jnp.divide(a, b)
        if jnp.issubdtype(a.dtype, jnp.floating)
        else jax.lax.div(*jnp.broadcast_arrays(a, b))
    )


def _modulo(a: jax.Array, b: jax.Array, fmod: int) -> jax.Array:
    """Remainder: with the divisor's sign, or with fmod=1 the dividend's."""
    return jnp.fmod(a, b) if fmod else jnp.mod(a, b)


def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    """x ** y in x's type, whatever y's; integers to integer powers by multiplication."""
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(y.dtype, jnp.integer):
        return jnp.power(x, y.astype(x.dtype))
    return jnp.power(x.astype(jnp.float32), y.astype(jnp.float32)).astype(x.dtype)


def _gelu(x: jax.Array, approximate: str) -> jax.Array:
    """x / 2 (1 + erf(x / sqrt 2)), or with tanh x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3)))."""
    return in_float32(partial(jax.nn.gelu, approximate=approximate == "tanh"))(x)


def _swish(x: jax.Array, alpha: float) -> jax.Array:
    """x sigmoid(alpha x)."""
    return in_float32(lambda wide: wide * jax.nn.sigmoid(alpha * wide))(x)


def _clip(x: jax.Array, low: jax.Array | float | None, high: jax.Array | float | None) -> jax.Array:
    """Minimum(maximum(x, low), high), so that high wins where they cross."""
    if low is not None:
        x = jnp.maximum(x, jnp.asarray(low, x.dtype))
    return x if high is None else jnp.minimum(x, jnp.asarray(high, x.dtype))


def _clip_by_inputs(call: Call, args: Arguments, env: Environment) -> Results:
    return (_clip(args["input"], args["min"], args["max"]),)


def _cast(call: Call, args: Arguments, env: Environment) -> Results:
    return (args["input"].astype(CAST_TARGETS[call.attributes["to"]]),)


def _cast_like(call: Call, args: Arguments, env: Environment) -> Results:
    return (args["input"].astype(args["target_type"].dtype),)


_FLOAT_FUNCTIONS = (
    ("Sqrt", 6, jnp.sqrt),
    ("Exp", 6, jnp.exp),
    ("Log", 6, jnp.log),
    ("Erf", 9, jax.scipy.special.erf),
    ("Tanh", 6, jnp.tanh),
    ("Sigmoid", 6, jax.nn.sigmoid),
    ("Softplus", 1, jax.nn.softplus),
    ("Reciprocal", 6, jnp.reciprocal),
    ("Sin", 7, jnp.sin),
    ("Cos", 7, jnp.cos),
)

_CASTED = Input("input", dtypes=TENSORS)

OPERATORS = (
    _binary("Add", 7, jnp.add),
    _binary("Sub", 7, jnp.subtract),
    _binary("Mul", 7, jnp.multiply),
    _binary("Div", 7, _divide),
    _operator(
        "Mod",
        10,
        (Input("A", dtypes=NUMBERS), Input("B", dtypes=NUMBERS)),
        _modulo,
        {"fmod": Attribute(0, only=(0, 1))},
    ),
    _binary("Pow", 7, _power),
    *(_unary(name, since, in_float32(function)) for name, since, function in _FLOAT_FUNCTIONS),
    _unary("Neg", 6, jnp.negative),
    _unary("Abs", 6, jnp.abs),
    _unary("Relu", 6, jax.nn.relu),
    _unary("Floor", 6, jnp.floor),
    _unary("Ceil", 6, jnp.ceil),
    _unary("Round", 11, jnp.round),
    _unary("Sign", 9, jnp.sign),
    _unary("IsNaN", 9, jnp.isnan),
    _unary("Swish", 24, _swish, {"alpha": Attribute(1.0)}),
    _operator(
        "SwiGLU",
        28,
        (Input("A", dtypes=FLOATING), Input("B", dtypes=FLOATING)),
        lambda a, b, alpha: _swish(a, alpha) * b,
        {"alpha": Attribute(1.0)},
    ),
    _unary("Gelu", 20, _gelu, {"approximate": Attribute("none", only=("none", "tanh"))}),
    _variadic("Min", 8, jnp.minimum),
    _variadic("Max", 8, jnp.maximum),
    _variadic("Sum", 8, jnp.add),
    _binary("Equal", 7, jnp.equal),
    _binary("Less", 7, jnp.less),
    _binary("Greater", 7, jnp.greater),
    _binary("LessOrEqual", 12, jnp.less_equal),
    _binary("GreaterOrEqual", 12, jnp.greater_equal),
    _binary("And", 7, jnp.logical_and),
    _binary("Or", 7, jnp.logical_or),
    _binary("Xor", 7, jnp.logical_xor),
    _unary("Not", 1, jnp.logical_not),
    _operator("Where", 9, tuple(Input(name, dtypes=TENSORS) for name in ("condition", "X", "Y")), jnp.where),
    _unary(
        "Clip",
        6,
        lambda x, **limits: _clip(x, limits["min"], limits["max"]),
        {"min": Attribute(None, of=float), "max": Attribute(None, of=float)},
    ),
    Operator(
        "",
        "Clip",
        11,
        (
            Input("input", dtypes=NUMBERS),
            Input("min", optional=True, dtypes=NUMBERS),
            Input("max", optional=True, dtypes=NUMBERS),
        ),
        {},
        _clip_by_inputs,
    ),
    *(
        Operator(
            "", "Cast", since, (_CASTED,), {"to": Attribute(only=tuple(CAST_TARGETS)), **attributes}, _cast
        )
        for since, attributes in ((6, {}), (19, _SATURATE), (24, _ROUND))
    ),
    *(
        Operator(
            "", "CastLike", since, (_CASTED, Input("target_type", dtypes=TENSORS)), attributes, _cast_like
        )
        for since, attributes in ((15, {}), (19, _SATURATE), (24, _ROUND))
    ),
)
