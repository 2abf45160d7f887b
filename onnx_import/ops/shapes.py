"""Operators that move, cut, repeat or count elements without computing on them.

Shapes are static: a target shape, axes, starts or repeats are constants or are folded from constants and shapes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from onnx_import.graph import Tensor
from onnx_import.registry import (
    INTEGERS,
    TENSORS,
    Arguments,
    Attribute,
    Call,
    Combines,
    Environment,
    Input,
    Operator,
    Results,
    Role,
    Run,
)

_MOST_PARTS = 256
"""Outputs that a Split may fill."""


def static(name: str, *, optional: bool = False) -> Input:
    """An input of integers that shape the program."""
    return Input(name, Role.STATIC, optional, INTEGERS)


def _any(name: str, *, optional: bool = False) -> Input:
    return Input(name, optional=optional, dtypes=TENSORS)


def axes_of(call: Call) -> tuple[int, ...] | None:
    """The axes of a node that has them as an attribute or, in newer opsets, as an input; None where absent."""
    axes = call.statics.get("axes", call.attributes.get("axes"))
    return None if axes is None else tuple(axes)


def sizes_along(name: str) -> Combines:
    """The size of an input's axis that the attribute `axis` names."""
    return lambda call, args: (args[name].shape[call.attributes["axis"]],)


def _concat_sizes(call: Call, args: Arguments) -> Iterator[int]:
    return (x.shape[call.attributes["axis"]] for x in args.values())


def _reshape(call: Call, args: Arguments, env: Environment) -> Results:
    """data to the target shape: 0 copies the size at the same place unless allowzero=1, -1 takes what is left."""
    data, target = args["data"], call.statics["shape"]
    if not call.attributes.get("allowzero"):
        target = tuple(data.shape[i] if size == 0 else size for i, size in enumerate(target))
    return (data.reshape(target),)


def _transpose(call: Call, args: Arguments, env: Environment) -> Results:
    return (jnp.transpose(args["data"], call.attributes["perm"]),)


def _squeeze(call: Call, args: Arguments, env: Environment) -> Results:
    return (jnp.squeeze(args["data"], axes_of(call)),)


def _unsqueeze(call: Call, args: Arguments, env: Environment) -> Results:
    return (jnp.expand_dims(args["data"], axes_of(call) or ()),)


def _flatten(call: Call, args: Arguments, env: Environment) -> Results:
    """input [d0, ..., dn] to [d0 ... d(axis - 1), d(axis) ... dn]."""
    shape, axis = args["input"].shape, call.attributes["axis"]
    split = axis + len(shape) if axis < 0 else axis
    return (args["input"].reshape(math.prod(shape[:split]), math.prod(shape[split:])),)


def _expand(call: Call, args: Arguments, env: Environment) -> Results:
    """Input and target broadcast against each other, so either may be the one with a size of 1."""
    shape = np.broadcast_shapes(args["input"].shape, call.statics["shape"])
    return (jnp.broadcast_to(args["input"], shape),)


def _concat(call: Call, args: Arguments, env: Environment) -> Results:
    return (jnp.concatenate(list(args.values()), axis=call.attributes["axis"]),)


def _split(call: Call, args: Arguments, env: Environment) -> Results:
    """Parts of the given sizes, else equal ones, the last of which is smaller where they don't divide the axis."""
    data, axis, parts = args["input"], call.attributes["axis"], len(call.node.outputs)
    width = data.shape[axis]
    sizes = call.statics.get("split", call.attributes.get("split"))
    if sizes is None:
        size = -(-width // parts)
        sizes = [*[size] * (parts - 1), width - size * (parts - 1)]
    if sum(sizes) != width or min(sizes) < 0 or len(sizes) != parts:
        raise ValueError(f"a split of {width} into {parts} parts of {list(sizes)}")
    return tuple(jnp.split(data, np.cumsum(sizes)[:-1].tolist(), axis=axis))


def _split_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    stated, parts = call.attributes.get("num_outputs"), len(call.node.outputs)
    if stated is not None and stated != parts:
        yield f"{call.node.label} has num_outputs={stated}, but {parts} outputs"


def _slice(call: Call, args: Arguments, env: Environment) -> Results:
    """Start, end and step by axis, counted and clamped as Python's slices are."""
    return (args["data"][tuple(_slices(call, args["data"].ndim))],)


def _slices(call: Call, rank: int) -> list[slice]:
    given: Mapping[str, Any] = {**call.attributes, **call.statics}
    starts, ends = given["starts"], given["ends"]
    axes = given.get("axes") or range(len(starts))
    steps = given.get("steps") or (1,) * len(starts)
    slices = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        slices[axis] = slice(start, end, step)
    return slices


def _sliced_sizes(call: Call, args: Arguments) -> Iterator[int]:
    shape = args["data"].shape
    pairs = zip(shape, _slices(call, len(shape)), strict=True)
    return (size for size, cut in pairs if cut.indices(size) != (0, size, 1))


def _tile(call: Call, args: Arguments, env: Environment) -> Results:
    return (jnp.tile(args["input"], call.statics["repeats"]),)


def _tiled_sizes(call: Call, args: Arguments) -> Iterator[int]:
    pairs = zip(args["input"].shape, call.statics["repeats"], strict=True)
    return (size for size, repeats in pairs if repeats != 1 and size != 1)


def _pad(call: Call, args: Arguments, env: Environment) -> Results:
    """data with pads = [begin of each axis, ..., end of each axis] elements of a constant, 0 where absent."""
    data, value = args["data"], args["constant_value"]
    value = jnp.zeros((), data.dtype) if value is None else value.reshape(())
    return (jax.lax.pad(data, value, _widths(call, data.ndim)),)


def _widths(call: Call, rank: int) -> list[tuple[int, int, int]]:
    pads = call.statics["pads"]
    axes = call.statics.get("axes", tuple(range(rank)))
    widths = [(0, 0, 0)] * rank
    for i, axis in enumerate(axes):
        widths[axis] = (pads[i], pads[i + len(axes)], 0)
    return widths


def _padded_sizes(call: Call, args: Arguments) -> Iterator[int]:
    pairs = zip(args["data"].shape, _widths(call, args["data"].ndim), strict=True)
    return (size for size, width in pairs if any(width))


def _trilu(call: Call, args: Arguments, env: Environment) -> Results:
    """The upper or lower triangle of the last two axes from diagonal k on, zeros elsewhere."""
    (k,) = call.statics.get("k", (0,))
    return ((jnp.triu if call.attributes["upper"] else jnp.tril)(args["input"], k),)


def _identity(call: Call, args: Arguments, env: Environment) -> Results:
    return (args["input"],)


def _shape(call: Call, args: Arguments, env: Environment) -> Results:
    """Sizes int32 [n] of the axes from start to end, in packed form."""
    return (
        np.array(args["data"].shape[call.attributes.get("start") : call.attributes.get("end")], np.int32),
    )


def _size(call: Call, args: Arguments, env: Environment) -> Results:
    return (np.array(math.prod(args["data"].shape), np.int32),)


def _constant_of_shape(call: Call, args: Arguments, env: Environment) -> Results:
    value = call.attributes["value"]
    fill = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    return (jnp.full(call.statics["input"], jnp.asarray(fill).reshape(())),)


def _constant_of_shape_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    value = call.attributes["value"]
    kind = None if value is None else onnx.helper.tensor_dtype_to_np_dtype(value.data_type).name
    if kind is not None and kind not in TENSORS:
        yield f"{call.node.label} has a value of type {kind}, which isn't supported"


def _range(call: Call, args: Arguments, env: Environment) -> Results:
    """Integers int32 from start by delta while they are short of limit."""
    (start,), (limit,), (delta,) = (call.statics[name] for name in ("start", "limit", "delta"))
    return (jnp.arange(start, limit, delta, dtype=jnp.int32),)


def _operator(
    op_type: str,
    since: int,
    inputs: tuple[Input, ...],
    run: Run,
    attributes: Mapping[str, Attribute] | None = None,
    **more: Any,
) -> Operator:
    return Operator("", op_type, since, inputs, attributes or {}, run, **more)


_PARTS = {"outputs": tuple(range(_MOST_PARTS)), "check": _split_check, "combines": sizes_along("input")}

OPERATORS = (
    _operator("Reshape", 5, (_any("data"), static("shape")), _reshape),
    _operator(
        "Reshape", 14, (_any("data"), static("shape")), _reshape, {"allowzero": Attribute(0, only=(0, 1))}
    ),
    _operator("Transpose", 1, (_any("data"),), _transpose, {"perm": Attribute(None, of=list)}),
    _operator("Squeeze", 1, (_any("data"),), _squeeze, {"axes": Attribute(None, of=list)}),
    _operator("Squeeze", 13, (_any("data"), static("axes", optional=True)), _squeeze),
    _operator("Unsqueeze", 1, (_any("data"),), _unsqueeze, {"axes": Attribute(of=list)}),
    _operator("Unsqueeze", 13, (_any("data"), static("axes")), _unsqueeze),
    _operator("Flatten", 1, (_any("input"),), _flatten, {"axis": Attribute(1)}),
    _operator("Expand", 8, (_any("input"), static("shape")), _expand),
    _operator(
        "Concat",
        4,
        (Input("inputs", dtypes=TENSORS, variadic=True),),
        _concat,
        {"axis": Attribute()},
        combines=_concat_sizes,
    ),
    _operator(
        "Split",
        2,
        (_any("input"),),
        _split,
        {"axis": Attribute(0), "split": Attribute(None, of=list)},
        **_PARTS,
    ),
    _operator(
        "Split",
        13,
        (_any("input"), static("split", optional=True)),
        _split,
        {"axis": Attribute(0)},
        **_PARTS,
    ),
    _operator(
        "Split",
        18,
        (_any("input"), static("split", optional=True)),
        _split,
        {"axis": Attribute(0), "num_outputs": Attribute(None)},
        **_PARTS,
    ),
    _operator(
        "Slice",
        1,
        (_any("data"),),
        _slice,
        {"starts": Attribute(of=list), "ends": Attribute(of=list), "axes": Attribute(None, of=list)},
        combines=_sliced_sizes,
    ),
    _operator(
        "Slice",
        10,
        (
            _any("data"),
            static("starts"),
            static("ends"),
            static("axes", optional=True),
            static("steps", optional=True),
        ),
        _slice,
        combines=_sliced_sizes,
    ),
    _operator("Tile", 6, (_any("input"), static("repeats")), _tile, combines=_tiled_sizes),
    _operator(
        "Pad",
        11,
        (
            _any("data"),
            static("pads"),
            _any("constant_value", optional=True),
            static("axes", optional=True),
        ),
        _pad,
        {"mode": Attribute("constant", only=("constant",))},
        combines=_padded_sizes,
    ),
    _operator(
        "Trilu",
        14,
        (_any("input"), static("k", optional=True)),
        _trilu,
        {"upper": Attribute(1, only=(0, 1))},
        combines=lambda call, args: args["input"].shape[-2:],
    ),
    _operator("Identity", 1, (_any("input"),), _identity),
    _operator("Shape", 1, (_any("data"),), _shape, of_shapes=True),
    _operator(
        "Shape",
        15,
        (_any("data"),),
        _shape,
        {"start": Attribute(0), "end": Attribute(None)},
        of_shapes=True,
    ),
    _operator("Size", 1, (_any("data"),), _size, of_shapes=True),
    _operator(
        "ConstantOfShape",
        9,
        (static("input"),),
        _constant_of_shape,
        {"value": Attribute(None, of=onnx.TensorProto)},
        check=_constant_of_shape_check,
    ),
    _operator("Range", 11, (static("start"), static("limit"), static("delta")), _range),
    _operator(
        "Range",
        27,
        (static("start"), static("limit"), static("delta")),
        _range,
        {"stash_type": Attribute(1, only=(1,))},
    ),
)
