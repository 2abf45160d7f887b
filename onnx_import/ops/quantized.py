"""Block-quantised weights: reading them (MatMulNBits, GatherBlockQuantized) and multiplying by integers.

Two ways to hold a MatMulNBits weight. *Exact*: dequantised block by block to a float matrix.
*Fast*: requantised to int8 with one scale an output row, multiplied on the processor's integer dot.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.ops.matmul import contract, dense_struct, dense_weight
from onnx_import.registry import (
    FLOATS,
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

_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
_SECOND = 254.0
"""The second activation term's denominator: a rounding error of at most 1/2 becomes at most 127."""


@flax.struct.dataclass
class QuantisedWeight:
    """codes int8 [out, in] times scale float32 [out] approximates the weight."""

    codes: Any
    scale: Any


@flax.struct.dataclass
class QuantisedTable:
    """Rows of block-wise codes: codes uint8 [rows, bytes], scales float [rows, blocks], zeros like scales."""

    codes: Any
    scales: Any
    zeros: Any


def integer_matmul(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """x float [..., in] times weight [out, in] through int8 dots: float32 [..., out].

    Each row of x becomes two int8 terms, x ~ s (q1 + q2 / 254), stacked along rows in one dot, so the error of
    the activations is that of 15 bits. Sums are exact integers while in <= 2**31 / 127**2 = 133,000.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    peak = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    scaled = rows / jnp.where(peak > 0, peak / 127.0, 1.0)
    first = jnp.round(scaled)
    second = jnp.round((scaled - first) * _SECOND)
    stacked = jnp.concatenate((first, second)).astype(jnp.int8)
    sums = jax.lax.dot_general(
        stacked, weight.codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    high, low = sums[: rows.shape[0]], sums[rows.shape[0] :]
    product = (high + low / _SECOND) * (peak / 127.0) * weight.scale
    return product.reshape(*x.shape[:-1], weight.codes.shape[0])


def quantise_rows(weight: np.ndarray) -> QuantisedWeight:
    """Round a float [out, in] matrix to int8 with one scale an output row."""
    peak = np.abs(weight).max(axis=1)
    scale = np.where(peak > 0, peak / 127, 1).astype(np.float32)
    codes = np.round(weight / scale[:, None]).astype(np.int8)
    return QuantisedWeight(codes=codes, scale=scale)


def unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of each row of bytes, low nibble first when bits is 4: [..., count] uint8."""
    if bits == 8:
        return data[..., :count]
    return np.stack((data & 15, data >> 4), axis=-1).reshape(*data.shape[:-1], -1)[..., :count]


def dequantise(
    data: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    *,
    bits: int,
    block_size: int,
    rows: int,
    columns: int,
) -> np.ndarray:
    """The float matrix [rows, columns] behind MatMulNBits' B, scales and zero points: (code - zero) * scale.

    Rows are whole blocks in the file and are cut to `columns`; absent zero points mean half the range.
    """
    blocks = -(-columns // block_size)
    scales = scales.reshape(rows, blocks)
    codes = unpack(data.reshape(rows, -1), bits, blocks * block_size).reshape(rows, blocks, block_size)
    zeros = zero_values(zero_points, scales, bits)
    values = (codes.astype(scales.dtype) - zeros[:, :, None]) * scales[:, :, None]
    return values.reshape(rows, -1)[:, :columns]


def zero_values(zero_points: np.ndarray | None, scales: np.ndarray, bits: int) -> np.ndarray:
    """Zero points as floats [rows, blocks]: absent, packed uint8 by row, or already float."""
    rows, blocks = scales.shape
    if zero_points is None:
        return np.full(scales.shape, 1 << (bits - 1), scales.dtype)
    if zero_points.dtype == np.uint8:
        return unpack(zero_points.reshape(rows, -1), bits, blocks).astype(scales.dtype)
    return zero_points.reshape(rows, blocks).astype(scales.dtype)


def _matmul_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    rows, columns = call.attributes["N"], call.attributes["K"]
    read = partial(
        dequantise,
        bits=call.attributes["bits"],
        block_size=call.attributes["block_size"],
        rows=rows,
        columns=columns,
    )
    sources = tuple(tensors[name] for name in ("B", "scales", "zero_points") if name in tensors)
    key = "+".join(source.key for source in sources)
    if mode == "fast":
        fast = QuantisedWeight(
            codes=jax.ShapeDtypeStruct((rows, columns), jnp.int8),
            scale=jax.ShapeDtypeStruct((rows,), jnp.float32),
        )
        return {"B": WeightPlan(f"{key}:int8", fast, sources, lambda *arrays: quantise_rows(read(*arrays)))}
    dense = dense_struct(rows, columns, tensors["scales"].dtype)
    return {"B": WeightPlan(f"{key}:dense", dense, sources, lambda *arrays: dense_weight(read(*arrays)))}


def _matmul_run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    x, weight = args["A"], args["B"]
    if isinstance(weight, QuantisedWeight):
        product = integer_matmul(x, weight).astype(x.dtype)
    else:
        product = contract(x, weight)
    return (product if args["bias"] is None else product + args["bias"],)


def _matmul_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    rows, columns, bits, size = (call.attributes[name] for name in ("N", "K", "bits", "block_size"))
    blocks = -(-columns // size)
    yield from _sizes(call, tensors, "B", rows * blocks * size * bits // 8)
    yield from _sizes(call, tensors, "scales", rows * blocks)
    yield from _zero_sizes(call, tensors, rows, blocks, bits)


def _table_shape(call: Call, tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
    rows, width = (
        tensors["data"].shape[0],
        int(np.prod(tensors["data"].shape[1:])) * 8 // call.attributes["bits"],
    )
    return rows, width, -(-width // call.attributes["block_size"])


def _table_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    rows, width, blocks = _table_shape(call, tensors)
    bits = call.attributes["bits"]
    sources = tuple(tensors[name] for name in ("data", "scales", "zero_points") if name in tensors)

    def build(data: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> QuantisedTable:
        scales = scales.reshape(rows, blocks)
        return QuantisedTable(
            codes=data.reshape(rows, -1), scales=scales, zeros=zero_values(zeros, scales, bits)
        )

    factors = jax.ShapeDtypeStruct((rows, blocks), tensors["scales"].dtype)
    codes = jax.ShapeDtypeStruct((rows, width * bits // 8), jnp.uint8)
    struct = QuantisedTable(codes=codes, scales=factors, zeros=factors)
    return {"data": WeightPlan("+".join(source.key for source in sources) + ":table", struct, sources, build)}


def _table_run(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    table, indices = args["data"], args["indices"]
    # `fill` makes the scale of an id past the table NaN, which is noticed, where the default would clamp.
    scales, zeros, codes = (
        jnp.take(part, indices, axis=0, mode=mode)
        for part, mode in ((table.scales, "fill"), (table.zeros, "fill"), (table.codes, "clip"))
    )
    if call.attributes["bits"] == 4:
        codes = jnp.stack((codes & 15, codes >> 4), axis=-1).reshape(*indices.shape, -1)
    width = codes.shape[-1]
    scales, zeros = (
        jnp.repeat(part, call.attributes["block_size"], axis=-1)[..., :width] for part in (scales, zeros)
    )
    return ((codes.astype(scales.dtype) - zeros) * scales,)


def _table_check(call: Call, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    rows, _, blocks = _table_shape(call, tensors)
    if call.attributes["quantize_axis"] not in (1, len(tensors["data"].shape) - 1):
        yield f"{call.node.label} has quantize_axis={call.attributes['quantize_axis']}, which isn't supported"
    yield from _sizes(call, tensors, "scales", rows * blocks)
    yield from _zero_sizes(call, tensors, rows, blocks, call.attributes["bits"])


def _sizes(call: Call, tensors: Mapping[str, Tensor], name: str, expected: int) -> Iterator[str]:
    shape = tensors[name].shape
    if int(np.prod(shape)) != expected:
        yield f"{call.node.label} needs {expected} elements in {name}, but its shape is {list(shape)}"


def _zero_sizes(
    call: Call, tensors: Mapping[str, Tensor], rows: int, blocks: int, bits: int
) -> Iterator[str]:
    if "zero_points" in tensors:
        packed = tensors["zero_points"].dtype == np.uint8
        yield from _sizes(call, tensors, "zero_points", rows * (-(-blocks * bits // 8) if packed else blocks))


_CODES = frozenset(("uint8",))

OPERATORS = (
    Operator(
        "com.microsoft",
        "MatMulNBits",
        1,
        (
            Input("A"),
            Input("B", Role.WEIGHT, dtypes=_CODES),
            Input("scales", Role.WEIGHT),
            Input("zero_points", Role.WEIGHT, optional=True, dtypes=FLOATS | _CODES),
            Input("g_idx", Role.REFUSED),
            Input("bias", optional=True),
        ),
        {
            "K": Attribute(),
            "N": Attribute(),
            "bits": Attribute(4, only=(4, 8)),
            "block_size": Attribute(only=_BLOCK_SIZES),
            # A hint on how coarsely a runtime may quantise the activations; `weights` decides that here.
            "accuracy_level": Attribute(0),
            "weight_prepacked": Attribute(0, only=(0,)),
        },
        _matmul_run,
        weights=_matmul_weights,
        check=_matmul_check,
    ),
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
            "bits": Attribute(4, only=(4, 8)),
            "block_size": Attribute(128, only=_BLOCK_SIZES),
            "gather_axis": Attribute(0, only=(0,)),
            "quantize_axis": Attribute(1),
        },
        _table_run,
        weights=_table_weights,
        check=_table_check,
    ),
)
