"""Products of activations with a float weight or each other; a row's bits don't depend on the number of rows.

XLA on CPU multiplies by narrow column blocks in one fixed order: multiply-add along `in`, whatever the rows. The same
layout is also the one that it streams fastest from memory with the few rows of a decode step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.graph import Tensor
from onnx_import.lazy import LazyArray
from onnx_import.registry import (
    FLOATING,
    NUMBERS,
    Arguments,
    Attribute,
    Call,
    Environment,
    Input,
    Operator,
    Role,
    WeightPlan,
)

_WIDTH = 64
"""Columns of a block: 32 gave other bits from 64 rows on, 16 was slow."""
_PART = 48
"""Most blocks in one array: the product of a vocabulary-wide head took twice as long in one piece."""
_MIN_PARTS = 2
"""Fewest arrays of a weight with as many blocks: halves took a sixth less time than wholes."""
_MAX_BATCHED_ROWS = 32
"""Up to here one batched product over the blocks is fastest, above it a loop over them; the bits are equal."""


@flax.struct.dataclass
class DenseWeight:
    """A weight [out, in] as column blocks: parts float [blocks, in, 64], `out` padded with zeros to whole blocks."""

    parts: tuple[Any, ...]
    out: int = flax.struct.field(pytree_node=False)


def dense_struct(rows: int, columns: int, dtype: np.dtype) -> DenseWeight:
    """Shapes of the DenseWeight of a [rows, columns] matrix."""
    blocks = -(-rows // _WIDTH)
    count = min(max(-(-blocks // _PART), _MIN_PARTS), blocks)
    sizes = [blocks * (i + 1) // count - blocks * i // count for i in range(count)]
    return DenseWeight(tuple(jax.ShapeDtypeStruct((size, columns, _WIDTH), dtype) for size in sizes), rows)


def dense_weight(weight: np.ndarray | LazyArray) -> DenseWeight:
    """Lay a matrix [out, in] out as column blocks, each part made from its own rows when it is read."""
    rows, columns = weight.shape
    parts: list[LazyArray] = []
    first = 0
    for part in dense_struct(rows, columns, weight.dtype).parts:

        def blocks(start: int, stop: int, first: int = first) -> np.ndarray:
            piece = weight[(first + start) * _WIDTH : (first + stop) * _WIDTH]
            padded = np.zeros(((stop - start) * _WIDTH, columns), weight.dtype)
            padded[: len(piece)] = piece
            return np.ascontiguousarray(padded.reshape(-1, _WIDTH, columns).transpose(0, 2, 1))

        parts.append(LazyArray(part.shape, weight.dtype, blocks))
        first += part.shape[0]
    return DenseWeight(tuple(parts), rows)


def contract(x: jax.Array, weight: DenseWeight) -> jax.Array:
    """x [..., in] times a weight [out, in], accumulated in float32, in x's dtype: [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    multiply = _batched if rows.shape[0] <= _MAX_BATCHED_ROWS else _looped
    product = multiply(rows, weight.parts)[:, : weight.out]
    return product.astype(x.dtype).reshape(*x.shape[:-1], weight.out)


def _batched(rows: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """One product a part, batched over its blocks: float32 [rows, blocks * 64]."""

    def multiply(part: jax.Array) -> jax.Array:
        repeated = jnp.broadcast_to(rows, (part.shape[0], *rows.shape))
        product = jax.lax.dot_general(
            repeated, part, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        return product.transpose(1, 0, 2).reshape(rows.shape[0], -1)

    return jnp.concatenate([multiply(part) for part in parts], axis=-1)


def _looped(rows: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """One product a block, written into its columns: float32 [rows, blocks * 64]."""
    blocks = sum(part.shape[0] for part in parts)
    # Every column is written. Zeros would do, but XLA makes room for constants of all layers before the first one.
    product = jnp.full((rows.shape[0], blocks * _WIDTH), rows[0, 0].astype(jnp.float32))
    first = 0
    for part in parts:

        def multiply(
            nth: jax.Array, done: jax.Array, part: jax.Array = part, first: int = first
        ) -> jax.Array:
            columns = jax.lax.dot_general(
                rows, part[nth], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return jax.lax.dynamic_update_slice(done, columns, (0, (first + nth) * _WIDTH))

        product = jax.lax.fori_loop(0, part.shape[0], multiply, product)
        first += part.shape[0]
    return product


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Matrix product of two activations, batched and broadcast as NumPy's, in x's dtype.

    By a matrix a row of x keeps its bits whatever the other rows; a batched product promises that for an inner size
    of one only.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.matmul(x, y)
    if y.ndim != 2:
        highest = jax.lax.Precision.HIGHEST
        return jnp.matmul(x, y, precision=highest, preferred_element_type=jnp.float32).astype(x.dtype)
    padded = jnp.pad(y, ((0, 0), (0, -y.shape[1] % _WIDTH)))
    blocks = padded.reshape(y.shape[0], -1, _WIDTH).transpose(1, 0, 2)
    return contract(x, DenseWeight((blocks,), y.shape[1]))


def _weight(tensor: Tensor | None, *, transposed: bool) -> dict[str, WeightPlan]:
    """The plan of a constant B [in, out], or [out, in] where transposed; none unless it is a float matrix."""
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype.name not in FLOATING:
        return {}
    tensor = tensor if transposed else tensor.transpose()
    rows, columns = tensor.shape
    struct = dense_struct(rows, columns, tensor.dtype)
    return {"B": WeightPlan(f"{tensor.key}:dense", struct, (tensor,), dense_weight)}


def _matmul_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    return _weight(tensors.get("B"), transposed=False)


def _matmul(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    """A [..., m, k] times B [..., k, n]: [..., m, n]."""
    product = contract if isinstance(args["B"], DenseWeight) else multiply
    return (product(args["A"], args["B"]),)


def _gemm_weights(call: Call, tensors: Mapping[str, Tensor], mode: str) -> Mapping[str, WeightPlan]:
    return _weight(tensors.get("B"), transposed=bool(call.attributes["transB"]))


def _gemm(call: Call, args: Arguments, env: Environment) -> tuple[jax.Array]:
    """alpha A' B' + beta C, with A' [m, k] and B' [k, n] transposed first where asked, and C broadcast to [m, n]."""
    a, b, c = args["A"], args["B"], args["C"]
    a = a.T if call.attributes["transA"] else a
    if isinstance(b, DenseWeight):
        product = contract(a, b)
    else:
        product = multiply(a, b.T if call.attributes["transB"] else b)
    product = product * jnp.asarray(call.attributes["alpha"], product.dtype)
    return (product if c is None else product + c * jnp.asarray(call.attributes["beta"], c.dtype),)


OPERATORS = (
    Operator(
        "",
        "MatMul",
        1,
        (Input("A", dtypes=NUMBERS), Input("B", Role.OPERAND, dtypes=NUMBERS)),
        {},
        _matmul,
        weights=_matmul_weights,
        combines=lambda call, args: args["A"].shape[-1:],
    ),
    Operator(
        "",
        "Gemm",
        7,
        (
            Input("A", dtypes=FLOATING),
            Input("B", Role.OPERAND, dtypes=FLOATING),
            Input("C", optional=True, dtypes=FLOATING),
        ),
        {
            "alpha": Attribute(1.0),
            "beta": Attribute(1.0),
            "transA": Attribute(0, only=(0, 1)),
            "transB": Attribute(0, only=(0, 1)),
        },
        _gemm,
        weights=_gemm_weights,
        combines=lambda call, args: args["A"].shape[:1] if call.attributes["transA"] else args["A"].shape[1:],
    ),
)
