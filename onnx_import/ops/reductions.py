"""Operators that reduce along axes: sums, means, extremes, softmax, running sums.

Float sums run along the last axis of a two-dimensional array as a product with ones (`sum_last`), in float32, so that a
row's bits don't depend on the number of rows. Extremes and integer sums have no order to keep.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.ops.norm import sum_last
from onnx_import.ops.shapes import axes_of, sizes_along, static
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

Reduce = Callable[[jax.Array, tuple[int, ...], bool], jax.Array]


def sum_axes(x: jax.Array, axes: tuple[int, ...], keepdims: bool = True) -> jax.Array:
    """Sum over axes in x's dtype; floats are added in float32 in an order that other axes' sizes don't change."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sum(x, axes, dtype=x.dtype, keepdims=keepdims)
    rows, shape = _rows(x, axes, keepdims)
    return sum_last(rows.astype(jnp.float32)).astype(x.dtype).reshape(shape)


def largest(x: jax.Array, axes: tuple[int, ...], keepdims: bool = True) -> jax.Array:
    """Largest float over axes of at least one element, NaN where there is one.

    Picked by its index: XLA on CPU fuses a plain maximum with the exponential that often follows, and then computes
    that by other instructions, whose last bit changes with the number of rows.
    """
    rows, shape = _rows(x, axes, keepdims)
    return jnp.take_along_axis(rows, jnp.argmax(rows, 1, keepdims=True), 1).reshape(shape)


def _rows(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> tuple[jax.Array, list[int]]:
    """x [rest, reduced], and the shape of the reduced array."""
    axes = tuple(sorted(axis % x.ndim for axis in axes))
    kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
    width = math.prod(x.shape[axis] for axis in axes)
    rows = x.transpose(kept + axes).reshape(math.prod(x.shape[axis] for axis in kept), width)
    return rows, [
        1 if axis in axes else size for axis, size in enumerate(x.shape) if keepdims or axis in kept
    ]


def _mean_axes(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    count = math.prod(x.shape[axis] for axis in axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.div(sum_axes(x, axes, keepdims), jnp.asarray(count, x.dtype))
    return (sum_axes(x.astype(jnp.float32), axes, keepdims) / count).astype(x.dtype)


def _extreme(reduce: Callable[..., jax.Array], sign: int) -> Reduce:
    """Largest or smallest; of nothing, the type's other end, infinite for floats."""

    def run(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
        if x.dtype == jnp.bool_:
            initial: bool | float = sign < 0
        elif not jnp.issubdtype(x.dtype, jnp.floating):
            initial = int(np.iinfo(x.dtype).min if sign > 0 else np.iinfo(x.dtype).max)
        elif x.size:
            return largest(x, axes, keepdims) if sign > 0 else -largest(-x, axes, keepdims)
        else:
            initial = -sign * np.inf
        return reduce(x, axes, keepdims=keepdims, initial=initial)

    return run


def _reducer(reduce: Reduce) -> Callable[[Call, Arguments, Environment], Results]:
    def run(call: Call, args: Arguments, env: Environment) -> Results:
        data, axes = args["data"], _reduced_axes(call, args)
        return (reduce(data, axes, bool(call.attributes["keepdims"])) if axes else data,)

    return run


def _reduced_axes(call: Call, args: Arguments) -> tuple[int, ...]:
    """The axes that the node names; all where it names none, unless noop_with_empty_axes=1."""
    axes = axes_of(call)
    if axes or call.attributes.get("noop_with_empty_axes"):
        return axes or ()
    return tuple(range(args["data"].ndim))


def _reduced_sizes(call: Call, args: Arguments) -> Iterator[int]:
    return (args["data"].shape[axis] for axis in _reduced_axes(call, args))


def softmax(x: jax.Array, axis: int) -> jax.Array:
    """exp(x - max) / sum(exp(x - max)) along an axis, in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    weights = jnp.exp(wide - largest(wide, (axis,)))
    return (weights / sum_axes(weights, (axis,))).astype(x.dtype)


def _log_softmax(x: jax.Array, axis: int) -> jax.Array:
    """x - max - log(sum(exp(x - max))) along an axis, in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    shifted = wide - largest(wide, (axis,))
    return (shifted - jnp.log(sum_axes(jnp.exp(shifted), (axis,)))).astype(x.dtype)


def _along(call: Call, args: Arguments, env: Environment, function: Callable[..., jax.Array]) -> Results:
    return (function(args["input"], call.attributes["axis"]),)


def _over_rest(call: Call, args: Arguments, env: Environment, function: Callable[..., jax.Array]) -> Results:
    """Before opset 13: over all axes from `axis` on, as one."""
    x, axis = args["input"], call.attributes["axis"]
    axis = axis + x.ndim if axis < 0 else axis
    rows = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return (function(rows, 1).reshape(x.shape),)


def _rest_sizes(call: Call, args: Arguments) -> Iterable[int]:
    return args["input"].shape[call.attributes["axis"] :]


def _cumulative_sum(call: Call, args: Arguments, env: Environment) -> Results:
    """Sums of x up to each element, without it where exclusive, from the end where reverse."""
    (axis,) = call.statics["axis"]
    x = args["x"]
    ordered = jnp.flip(x, axis) if call.attributes["reverse"] else x
    total = jnp.cumsum(ordered, axis, dtype=x.dtype)
    if call.attributes["exclusive"]:
        total = jnp.roll(total, 1, axis)
        first = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim) == 0
        total = jnp.where(first, jnp.zeros((), x.dtype), total)
    return (jnp.flip(total, axis) if call.attributes["reverse"] else total,)


_KEEP = {"keepdims": Attribute(1, only=(0, 1))}
_BY_ATTRIBUTE = {**_KEEP, "axes": Attribute(None, of=list)}
_BY_INPUT = {**_KEEP, "noop_with_empty_axes": Attribute(0, only=(0, 1))}


def _reductions(op_type: str, input_since: int, reduce: Reduce) -> tuple[Operator, Operator]:
    """Both forms: axes as an attribute, and as an input from `input_since` on."""
    data, run = Input("data", dtypes=TENSORS), _reducer(reduce)
    return (
        Operator("", op_type, 1, (data,), _BY_ATTRIBUTE, run, combines=_reduced_sizes),
        Operator(
            "",
            op_type,
            input_since,
            (data, static("axes", optional=True)),
            _BY_INPUT,
            run,
            combines=_reduced_sizes,
        ),
    )


OPERATORS = (
    *_reductions("ReduceSum", 13, sum_axes),
    *_reductions("ReduceMean", 18, _mean_axes),
    *_reductions("ReduceMax", 18, _extreme(jnp.max, 1)),
    *_reductions("ReduceMin", 18, _extreme(jnp.min, -1)),
    *(
        Operator(
            "",
            name,
            since,
            (Input("input", dtypes=FLOATING),),
            {"axis": Attribute(axis)},
            partial(run, function=function),
            combines=sizes,
        )
        for name, function in (("Softmax", softmax), ("LogSoftmax", _log_softmax))
        for since, axis, run, sizes in (
            (1, 1, _over_rest, _rest_sizes),
            (13, -1, _along, sizes_along("input")),
        )
    ),
    Operator(
        "",
        "CumSum",
        11,
        (Input("x", dtypes=NUMBERS), static("axis")),
        {"exclusive": Attribute(0, only=(0, 1)), "reverse": Attribute(0, only=(0, 1))},
        _cumulative_sum,
        combines=lambda call, args: (args["x"].shape[call.statics["axis"][0]],),
    ),
)
