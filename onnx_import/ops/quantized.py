"""Products with block-quantised weights (MatMulNBits), by floats or by integers.

Two ways to hold such a weight. *Exact*: dequantised block by block to a float matrix.
*Fast*: requantised to int8 with one scale an output row, multiplied on the processor's integer dot.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.lazy import LazyArray
from onnx_import.ops.matmul import contract, dense_struct, dense_weight
from onnx_import.ops.packing import BITS, BLOCK_SIZES, dequantise, packed_bytes
from onnx_import.registry import (
    FLOATS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
    WeightPlan,
)

_SECOND = 254.0
"""The second activation term's denominator: a rounding error of at most 1/2 becomes at most 127."""


@flax.struct.dataclass
class QuantisedWeight:
    """codes int8 [out, in] times scale float32 [out] approximates the weight."""

    codes: Any
    scale: Any


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
    scale = _row_scales(weight)
    return QuantisedWeight(codes=_row_codes(weight, scale), scale=scale)


def _quantised(weight: LazyArray) -> QuantisedWeight:
    """The same of a matrix that is never whole in memory: its rows are made twice, for the scales and the codes."""
    scale = np.concatenate([_row_scales(piece) for _, piece in weight.pieces()])
    codes = LazyArray(
        weight.shape,
        np.dtype(np.int8),
        lambda start, stop: _row_codes(weight[start:stop], scale[start:stop]),
    )
    return QuantisedWeight(codes=codes, scale=scale)


def _row_scales(weight: np.ndarray) -> np.ndarray:
    peak = np.abs(weight).max(axis=1)
    return np.where(peak > 0, peak / 127, 1).astype(np.float32)


def _row_codes(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.round(weight / scale[:, None]).astype(np.int8)


def _matmul_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    rows, columns = call.attributes["N"], call.attributes["K"]
    sizes = {"bits": call.attributes["bits"], "block_size": call.attributes["block_size"]}
    read = partial(_by_rows, rows, columns, partial(dequantise, **sizes, columns=columns))
    sources = tuple(tensors[name] for name in ("B", "scales", "zero_points") if name in tensors)
    key = f"{'+'.join(source.key for source in sources)}:{call.attributes['bits']}x{call.attributes['block_size']}"
    if mode == "fast":
        fast = QuantisedWeight(
            codes=jax.ShapeDtypeStruct((rows, columns), jnp.int8),
            scale=jax.ShapeDtypeStruct((rows,), jnp.float32),
        )
        return {"B": WeightPlan(f"{key}:int8", fast, sources, lambda *arrays: _quantised(read(*arrays)))}
    dense = dense_struct(rows, columns, tensors["scales"].dtype)
    return {"B": WeightPlan(f"{key}:dense", dense, sources, lambda *arrays: dense_weight(read(*arrays)))}


def _by_rows(
    rows: int, columns: int, read: Callable[..., np.ndarray], data: np.ndarray, *others: np.ndarray
) -> LazyArray:
    """The matrix behind codes, scales and zero points, each of whose rows depends on that row of theirs only."""
    parts = [array.reshape(rows, -1) for array in (data, *others)]

    def made(start: int, stop: int) -> np.ndarray:
        return read(*(part[start:stop] for part in parts), rows=stop - start)

    return LazyArray((rows, columns), others[0].dtype, made)


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
    yield from check_size(call, tensors, "B", (rows, blocks, size * bits // 8))
    yield from check_size(call, tensors, "scales", (rows, blocks))
    yield from check_zero_points(call, tensors, "zero_points", (rows, blocks), bits)
    yield from check_size(call, tensors, "bias", (rows,))


def check_size(
    call: Call, tensors: Mapping[str, Tensor], name: str, expected: tuple[int, ...]
) -> Iterator[str]:
    """A problem when a constant hasn't as many elements as `expected`; files hold some of them flat."""
    if name in tensors and math.prod(tensors[name].shape) != math.prod(expected):
        yield (
            f"{call.node.label} needs {math.prod(expected)} elements in {name}, {list(expected)}, "
            f"but its shape is {list(tensors[name].shape)}"
        )


def check_zero_points(
    call: Call, tensors: Mapping[str, Tensor], name: str, blocks: tuple[int, ...], bits: int
) -> Iterator[str]:
    """A problem when zero points fit neither floats of shape `blocks` nor codes packed along its last axis."""
    if name in tensors:
        packed = *blocks[:-1], packed_bytes(blocks[-1], bits)
        yield from check_size(call, tensors, name, packed if tensors[name].dtype == np.uint8 else blocks)


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
            "bits": Attribute(4, only=BITS),
            "block_size": Attribute(only=BLOCK_SIZES),
            # A hint on how coarsely a runtime may quantise the activations; `weights` decides that here.
            "accuracy_level": Attribute(0),
            "weight_prepacked": Attribute(0, only=(0,)),
        },
        _matmul_run,
        weights=_matmul_weights,
        check=_matmul_check,
    ),
)
