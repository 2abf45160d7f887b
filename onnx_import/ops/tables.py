"""Embedding tables of block-quantised rows (GatherBlockQuantized): looked up packed, dequantised after.

A file holds codes of 2, 4 or 8 bits in uint8, or int4 and uint4 elements. Here all are unsigned codes packed along the
last axis, with the gathered axis first; a signed code and its zero point are both raised by 8.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.ops.packing import BITS, BLOCK_SIZES, pack, packed_bytes, zero_values
from onnx_import.ops.quantized import check_size, check_zero_points
from onnx_import.registry import (
    INTEGERS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
    WeightPlan,
)

_CODES = frozenset(("uint8", "int4", "uint4"))
_RAISED = {"int4": 8, "uint4": 0}


@flax.struct.dataclass
class QuantisedTable:
    """Codes uint8 [rows, ..., bytes] of a last axis `width` long, scales and zeros float [rows, ..., blocks, ...].

    Where blocks lie along the gathered axis, scales and zeros begin with blocks instead of rows.
    """

    codes: Any
    scales: Any
    zeros: Any
    width: int = flax.struct.field(pytree_node=False)


def _axes(call: Call, rank: int) -> tuple[int, int]:
    """The gathered and the quantised axis, counted from the front."""
    return call.attributes["gather_axis"] % rank, call.attributes["quantize_axis"] % rank


def _shapes(call: Call, tensors: Mapping[str, Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes in elements of the data and of its scales, as in the file."""
    data = tensors["data"]
    fields = 8 // call.attributes["bits"] if data.dtype == np.uint8 else 1
    shape = [*data.shape[:-1], data.shape[-1] * fields]
    axis = _axes(call, len(shape))[1]
    blocks = [*shape]
    blocks[axis] = -(-shape[axis] // call.attributes["block_size"])
    return tuple(shape), tuple(blocks)


def _gathered_first(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])


def _weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    shape, blocks = _shapes(call, tensors)
    axis, bits = _axes(call, len(shape))[0], call.attributes["bits"]
    sources = tuple(tensors[name] for name in ("data", "scales", "zero_points") if name in tensors)
    moved, factors = (_gathered_first(item, axis) for item in (shape, blocks))

    def build(data: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> QuantisedTable:
        if data.dtype == np.uint8:
            codes, zeros = data, zero_values(zeros, blocks, bits)
        else:
            raised = _RAISED[data.dtype.name]
            codes = pack(np.moveaxis((data.astype(np.int8) + raised).astype(np.uint8), axis, 0), bits)
            zeros = (
                np.zeros(blocks, np.float32) if zeros is None else zeros.reshape(blocks).astype(np.float32)
            )
            zeros = zeros + np.float32(raised)
        scales, zeros = (np.moveaxis(part.reshape(blocks), axis, 0) for part in (scales, zeros))
        return QuantisedTable(codes, scales, zeros.astype(scales.dtype), moved[-1])

    table = QuantisedTable(
        codes=jax.ShapeDtypeStruct((*moved[:-1], packed_bytes(moved[-1], bits)), jnp.uint8),
        scales=jax.ShapeDtypeStruct(factors, tensors["scales"].dtype),
        zeros=jax.ShapeDtypeStruct(factors, tensors["scales"].dtype),
        width=moved[-1],
    )
    kind = ",".join(
        f"{name}={call.attributes[name]}" for name in ("bits", "block_size", "gather_axis", "quantize_axis")
    )
    key = f"{'+'.join(source.key for source in sources)}:table({kind})"
    return {"data": WeightPlan(key, table, sources, build)}


def _run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    table, indices = args["data"], args["indices"]
    bits, size = call.attributes["bits"], call.attributes["block_size"]
    axis, quantised = _axes(call, table.codes.ndim)
    rows = table.codes.shape[0]
    indices = jnp.where(indices < 0, indices + rows, indices)
    # `fill` makes the scale of an id past the table NaN, which is noticed, where the default would clamp.
    inside = (indices >= 0) & (indices < rows)
    block = jnp.where(inside, indices // size if quantised == axis else indices, rows)
    codes = jnp.take(table.codes, indices, axis=0, mode="clip")
    scales, zeros = (
        jnp.take(part, block, axis=0, mode="fill").astype(jnp.float32) for part in (table.scales, table.zeros)
    )
    fields = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    codes = jnp.stack(fields, axis=-1).reshape(*codes.shape[:-1], -1)[..., : table.width]
    if quantised != axis:
        along = indices.ndim + quantised - (quantised > axis)
        scales, zeros = (
            jnp.repeat(part, size, axis=along)[_cut(codes.shape, along)] for part in (scales, zeros)
        )
    values = ((codes.astype(jnp.float32) - zeros) * scales).astype(table.scales.dtype)
    return (jnp.moveaxis(values, range(indices.ndim), range(axis, axis + indices.ndim)),)


def _cut(shape: tuple[int, ...], axis: int) -> tuple[slice, ...]:
    """An index that keeps as much of an axis as `shape` has: the last block may be a part."""
    return (slice(None),) * axis + (slice(shape[axis]),)


def _check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    label, data, zeros = call.node.label, tensors["data"], tensors.get("zero_points")
    rank = len(data.shape)
    for name in ("gather_axis", "quantize_axis"):
        if not -rank <= call.attributes[name] < rank or rank < 2:
            yield f"{label} has {name}={call.attributes[name]} for data of shape {list(data.shape)}"
            return
    axis, quantised = _axes(call, rank)
    if zeros is not None and zeros.dtype != data.dtype:
        yield f"{label} has zero_points of type {zeros.dtype.name} for data of type {data.dtype.name}"
    if data.dtype != np.uint8 and call.attributes["bits"] != 4:
        yield f"{label} has bits={call.attributes['bits']} for data of type {data.dtype.name}"
    elif data.dtype == np.uint8 and (axis != 0 or quantised != rank - 1):
        yield (
            f"{label} has gather_axis={axis} and quantize_axis={quantised} for uint8 data of rank {rank}; "
            f"only the first and the last axis are supported"
        )
    else:
        blocks = _shapes(call, tensors)[1]
        yield from check_size(call, tensors, "scales", blocks)
        if data.dtype == np.uint8:
            yield from check_zero_points(call, tensors, "zero_points", blocks, call.attributes["bits"])
        else:
            yield from check_size(call, tensors, "zero_points", blocks)


OPERATORS = (
    Operator(
        "com.microsoft",
        "GatherBlockQuantized",
        1,
        (
            Input("data", Role.WEIGHT, dtypes=_CODES),
            Input("indices", dtypes=INTEGERS),
            Input("scales", Role.WEIGHT),
            Input("zero_points", Role.WEIGHT, optional=True, dtypes=_CODES),
        ),
        {
            "bits": Attribute(4, only=BITS),
            "block_size": Attribute(128, only=BLOCK_SIZES),
            "gather_axis": Attribute(0),
            "quantize_axis": Attribute(1),
        },
        _run,
        weights=_weights,
        check=_check,
    ),
)
