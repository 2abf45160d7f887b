"""Normalisations of the standard domain, from their ONNX definitions; sums and roots are taken in float32.

Layer and RMS normalisation take the axes from `axis` on as one; the second stage, scale and bias, works in X's dtype.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from onnx_import.ops.reductions import sum_axes
from onnx_import.ops.shapes import sizes_along
from onnx_import.registry import FLOATING, Arguments, Attribute, Call, Environment, Input, Operator, Results


def _mean_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return sum_axes(x, axes) / count


def _axes_from(call: Call, rank: int) -> tuple[int, ...]:
    return tuple(range(call.attributes["axis"] % rank, rank))


def _normalised_sizes(call: Call, args: Arguments) -> Iterable[int]:
    return args["X"].shape[call.attributes["axis"] :]


def _layer(call: Call, args: Arguments, env: Environment) -> Results:
    """(X - mean) / sqrt(variance + epsilon) * Scale + B, and the mean and 1 / sqrt(...) in float32."""
    x = args["X"]
    axes, wide = _axes_from(call, x.ndim), x.astype(jnp.float32)
    mean = _mean_over(wide, axes)
    centred = wide - mean
    inverse = 1 / jnp.sqrt(_mean_over(jnp.square(centred), axes) + call.attributes["epsilon"])
    scaled = (centred * inverse).astype(x.dtype) * args["Scale"]
    return scaled if args["B"] is None else scaled + args["B"], mean, inverse


def _rms(call: Call, args: Arguments, env: Environment) -> Results:
    """X / sqrt(mean(X**2) + epsilon) * scale."""
    x = args["X"]
    wide = x.astype(jnp.float32)
    root = jnp.sqrt(_mean_over(jnp.square(wide), _axes_from(call, x.ndim)) + call.attributes["epsilon"])
    return ((wide / root).astype(x.dtype) * args["scale"],)


def _lp(call: Call, args: Arguments, env: Environment) -> Results:
    """Input / norm along the axis, where norm is the sum of magnitudes (p=1) or their root sum of squares (p=2)."""
    wide, axes = args["input"].astype(jnp.float32), (call.attributes["axis"],)
    if call.attributes["p"] == 1:
        norm = sum_axes(jnp.abs(wide), axes)
    else:
        norm = jnp.sqrt(sum_axes(jnp.square(wide), axes))
    return (jnp.where(norm == 0, 0, wide / jnp.where(norm == 0, 1, norm)).astype(args["input"].dtype),)


def _floats(name: str) -> Input:
    return Input(name, dtypes=FLOATING)


_EPSILON = 9.999999747378752e-06
"""The definition's 1e-5 as a float32."""
_ATTRIBUTES = {
    "axis": Attribute(-1),
    "epsilon": Attribute(_EPSILON),
    "stash_type": Attribute(1, only=(1,)),
}

OPERATORS = (
    Operator(
        "",
        "LayerNormalization",
        17,
        (_floats("X"), _floats("Scale"), Input("B", optional=True, dtypes=FLOATING)),
        _ATTRIBUTES,
        _layer,
        combines=_normalised_sizes,
        outputs=(0, 1, 2),
    ),
    Operator(
        "",
        "RMSNormalization",
        23,
        (_floats("X"), _floats("scale")),
        _ATTRIBUTES,
        _rms,
        combines=_normalised_sizes,
    ),
    Operator(
        "",
        "LpNormalization",
        1,
        (_floats("input"),),
        {"axis": Attribute(-1), "p": Attribute(2, only=(1, 2))},
        _lp,
        combines=sizes_along("input"),
    ),
)
