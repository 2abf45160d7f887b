"""Operators that read or write elements at computed indices.

A negative index counts from the end. One past the end reads a fill value (NaN in floats, the smallest value in
integers), which is noticed, where clamping would not be, and writes nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from onnx_import.graph import Tensor
from onnx_import.ops.shapes import sizes_along, static
from onnx_import.registry import (
    INTEGERS,
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


def _wrapped(indices: jax.Array, size: int) -> jax.Array:
    """Negative indices counted from the end, unless they lie before the beginning: those go past the end."""
    shifted = jnp.where(indices < 0, indices + size, indices)
    return jnp.where(shifted < 0, size, shifted)


def _gather(call: Call, args: Arguments, env: Environment) -> Results:
    """data [..., n, ...] at indices [...] along the axis, whose place the indices' shape takes."""
    data, axis = args["data"], call.attributes["axis"]
    return (jnp.take(data, _wrapped(args["indices"], data.shape[axis]), axis=axis, mode="fill"),)


def _gather_elements(call: Call, args: Arguments, env: Environment) -> Results:
    """out[i, j, k] = data[i, indices[i, j, k], k] for axis 1: shaped like indices, which may be smaller than data."""
    data, indices, axis = args["data"], args["indices"], call.attributes["axis"]
    index = _grid(indices, axis % data.ndim, data.shape[axis])
    return (data.at[index].get(mode="fill"),)


def _grid(indices: jax.Array, axis: int, size: int) -> tuple[jax.Array, ...]:
    """One index array an axis: each element's own place, but `indices` along `axis`."""
    grid = [jax.lax.broadcasted_iota(jnp.int32, indices.shape, i) for i in range(indices.ndim)]
    grid[axis] = _wrapped(indices, size)
    return tuple(grid)


def _gather_nd(call: Call, args: Arguments, env: Environment) -> Results:
    """data [b..., d...] at indices [b..., i..., k]: the last axis of indices names a place in the first k of d."""
    data, indices = args["data"], args["indices"]

    def gather(data: jax.Array, indices: jax.Array) -> jax.Array:
        return data.at[_places(indices, data.shape)].get(mode="fill")

    for _ in range(call.attributes["batch_dims"]):
        gather = jax.vmap(gather)
    return (gather(data, indices),)


def _places(indices: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return tuple(_wrapped(indices[..., i], shape[i]) for i in range(indices.shape[-1]))


def _indexed_sizes(call: Call, args: Arguments) -> Iterator[int]:
    first = call.attributes.get("batch_dims", 0)
    return iter(args["data"].shape[first : first + args["indices"].shape[-1]])


def _scatter_nd(call: Call, args: Arguments, env: Environment) -> Results:
    """data with updates [i..., d[k:]...] at indices [i..., k]."""
    data, indices = args["data"], args["indices"]
    return (_write(call, data, _places(indices, data.shape), args["updates"]),)


def _scatter_elements(call: Call, args: Arguments, env: Environment) -> Results:
    """data with out[i, indices[i, j, k], k] = updates[i, j, k] for axis 1."""
    data, indices, axis = args["data"], args["indices"], call.attributes["axis"]
    return (_write(call, data, _grid(indices, axis % data.ndim, data.shape[axis]), args["updates"]),)


def _write(call: Call, data: jax.Array, index: tuple[jax.Array, ...], updates: jax.Array) -> jax.Array:
    target = data.at[index]
    writers: dict[str, Callable[..., jax.Array]] = {
        "none": target.set,
        "add": target.add,
        "mul": target.multiply,
        "max": target.max,
        "min": target.min,
    }
    return writers[call.attributes.get("reduction", "none")](updates, mode="drop")


def _tensor_scatter(call: Call, args: Arguments, env: Environment) -> Results:
    """past_cache [b, ..., n, ...] with update [b, ..., s, ...] from write_indices [b] (or 0) on along the axis."""
    cache, update, first = args["past_cache"], args["update"], args["write_indices"]
    axis = call.attributes["axis"] % cache.ndim
    index = [jax.lax.broadcasted_iota(jnp.int32, update.shape, i) for i in range(update.ndim)]
    if first is not None:
        index[axis] = index[axis] + first.astype(jnp.int32).reshape(-1, *(1,) * (update.ndim - 1))
    if call.attributes["mode"] == "circular":
        index[axis] = index[axis] % cache.shape[axis]
    return (cache.at[tuple(index)].set(update, mode="drop"),)


def _tensor_scatter_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if call.attributes["axis"] == 0:
        yield f"{call.node.label} has axis=0, the batch, along which it can't write"


def _top_k(call: Call, args: Arguments, env: Environment) -> Results:
    """The k largest (or smallest) of X along the axis in order, and their indices int32; the lower index first."""
    x, axis = args["X"], call.attributes["axis"]
    k: int = call.statics["K"][0] if "K" in call.statics else call.attributes["k"]
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"the {k} largest of {x.shape[axis]} elements")
    order = jnp.argsort(x, axis=axis, stable=True, descending=bool(call.attributes.get("largest", 1)))
    indices = jax.lax.slice_in_dim(order, 0, k, axis=axis % x.ndim)
    return jnp.take_along_axis(x, indices, axis=axis), indices


def _any(name: str) -> Input:
    return Input(name, dtypes=TENSORS)


_INDICES = Input("indices", dtypes=INTEGERS)
_TOP_INPUTS = (Input("X", dtypes=NUMBERS), static("K"))
_AXIS: dict[str, Any] = {"axis": Attribute(0)}

OPERATORS = (
    Operator("", "Gather", 1, (_any("data"), _INDICES), _AXIS, _gather, combines=sizes_along("data")),
    Operator(
        "",
        "GatherElements",
        11,
        (_any("data"), _INDICES),
        _AXIS,
        _gather_elements,
        combines=sizes_along("data"),
    ),
    Operator(
        "",
        "GatherND",
        11,
        (_any("data"), _INDICES),
        {"batch_dims": Attribute(0)},
        _gather_nd,
        combines=_indexed_sizes,
    ),
    *(
        Operator(
            "",
            name,
            since,
            (_any("data"), _INDICES, _any("updates")),
            {**axis, **reduction},
            run,
            combines=sizes,
        )
        for name, run, axis, sizes in (
            ("ScatterND", _scatter_nd, {}, _indexed_sizes),
            ("ScatterElements", _scatter_elements, _AXIS, sizes_along("data")),
        )
        for since, reduction in (
            (11, {}),
            (16, {"reduction": Attribute("none", only=("none", "add", "mul"))}),
            (18, {"reduction": Attribute("none", only=("none", "add", "mul", "max", "min"))}),
        )
    ),
    Operator(
        "",
        "TopK",
        1,
        _TOP_INPUTS[:1],
        {"axis": Attribute(-1), "k": Attribute()},
        _top_k,
        outputs=(0, 1),
        combines=sizes_along("X"),
    ),
    Operator(
        "",
        "TopK",
        10,
        _TOP_INPUTS,
        {"axis": Attribute(-1)},
        _top_k,
        outputs=(0, 1),
        combines=sizes_along("X"),
    ),
    Operator(
        "",
        "TopK",
        11,
        _TOP_INPUTS,
        {
            "axis": Attribute(-1),
            "largest": Attribute(1, only=(0, 1)),
            # The order that an unsorted result may have is open, so sorted is right for both.
            "sorted": Attribute(1, only=(0, 1)),
        },
        _top_k,
        outputs=(0, 1),
        combines=sizes_along("X"),
    ),
)

CACHE_OPERATORS = (
    Operator(
        "",
        "TensorScatter",
        24,
        (_any("past_cache"), _any("update"), Input("write_indices", optional=True, dtypes=INTEGERS)),
        {"axis": Attribute(-2), "mode": Attribute("linear", only=("linear", "circular"))},
        _tensor_scatter,
        check=_tensor_scatter_check,
    ),
)
