"""What a kernel asks of the hardware, and the same asked of an interpreter on a CPU.

Interpretation simulates copies, barriers and threads, but knows no layouts of registers and multiplies no registers by
shared memory. So a kernel gets these few operations as a value; all else in it is one text for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup's product."""


class Units(NamedTuple):
    """Products and layouts. A matrix has `ROWS` rows, or a multiple.

    Attributes:
        matrix: Lays [rows, n] out as products have it.
        column: Lays [rows], one number a row, out as reductions of matrices have it.
        row_numbers: From rows to int32[rows], laid out as a column.
        column_numbers: From n to int32[n], one number a column of a matrix.
        row: Lays [n], one number a column, out as sums over the rows of a matrix.
        decoded: From codes [rows, n] in shared memory, and a type, the same numbers.
        decoded_row_numbers: From rows to int32[rows], laid out as a column of what is decoded.
        decoded_columns: Repeats such a column n times, as [rows, n] of what is decoded.
        scores: float32[ROWS, n] of queries[ROWS, d] and keys[n, d], both in shared memory.
        add_product: From total[ROWS, d], weights[ROWS, n] and values[n, d] in shared memory, total + weights values.
        transforms: From (width, dtype), how shared memory [.., rows, width] lies for products and bulk copies.
    """

    matrix: Callable[[jax.Array], jax.Array]
    column: Callable[[jax.Array], jax.Array]
    row_numbers: Callable[[int], jax.Array]
    column_numbers: Callable[[int], jax.Array]
    row: Callable[[jax.Array], jax.Array]
    decoded: Callable[[Any, Any], jax.Array]
    decoded_row_numbers: Callable[[int], jax.Array]
    decoded_columns: Callable[[jax.Array, int], jax.Array]
    scores: Callable[[Any, Any], jax.Array]
    add_product: Callable[[jax.Array, jax.Array, Any], jax.Array]
    transforms: Callable[[int, Any], tuple[Any, ...]]


def swizzle_of(width: int, itemsize: int) -> int | None:
    """Returns the widest swizzle, in bytes, that divides rows of `width` elements; None if none does."""
    return next((size for size in (128, 64, 32) if width * itemsize % size == 0), None)


def _scores(queries: Any, keys: Any) -> jax.Array:
    def product(total: Any) -> jax.Array:
        plgpu.wgmma(total, queries, keys.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, keys.shape[0]), jnp.float32))


def _add_product(total: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
    def product(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(total))


def _decoded(codes: Any, dtype: Any) -> jax.Array:
    # Four neighbouring codes a thread, which fill a register.
    numbers = plgpu.layout_cast(codes[...], plgpu.Layout.WGMMA_UPCAST_2X)
    direct = (jnp.int8, jnp.bfloat16), (jnp.float8_e4m3fn, jnp.float16)
    if (codes.dtype, dtype) not in direct:
        numbers = numbers.astype(jnp.float32)
    return numbers.astype(dtype)


def _transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle_of(width, itemsize)
    if swizzle is None:
        return ()
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


TENSOR_CORES = Units(
    matrix=lambda value: plgpu.layout_cast(value, plgpu.Layout.WGMMA),
    column=lambda value: plgpu.layout_cast(value, plgpu.Layout.WGMMA.reduce(1)),
    row_numbers=lambda rows: plgpu.broadcasted_iota(
        jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
    ),
    column_numbers=lambda columns: plgpu.broadcasted_iota(
        jnp.int32, (columns,), 0, layout=plgpu.Layout.WGMMA.reduce(0)
    ),
    row=lambda value: plgpu.layout_cast(value, plgpu.Layout.WGMMA.reduce(0)),
    decoded=_decoded,
    decoded_row_numbers=lambda rows: plgpu.broadcasted_iota(
        jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA_UPCAST_2X.reduce(1)
    ),
    decoded_columns=lambda column, n: plgpu.layout_cast(
        lax.broadcast_in_dim(column, (*column.shape, n), (0,)), plgpu.Layout.WGMMA_UPCAST_2X
    ),
    scores=_scores,
    add_product=_add_product,
    transforms=_transforms,
)
"""Those of Hopper."""


def _interpreted_scores(queries: Any, keys: Any) -> jax.Array:
    result = lax.dot_general(
        queries[...], keys[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    # Tensor cores read as bulk copies do; these reads have to be ordered before the copies that come next.
    plgpu.commit_smem()
    return result


def _interpreted_add_product(total: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
    result = total + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()
    return result


INTERPRETED = Units(
    matrix=lambda value: value,
    column=lambda value: value,
    row_numbers=lambda rows: jnp.arange(rows, dtype=jnp.int32),
    column_numbers=lambda columns: jnp.arange(columns, dtype=jnp.int32),
    row=lambda value: value,
    decoded=lambda codes, dtype: codes[...].astype(dtype),
    decoded_row_numbers=lambda rows: jnp.arange(rows, dtype=jnp.int32),
    decoded_columns=lambda column, n: lax.broadcast_in_dim(column, (*column.shape, n), (0,)),
    scores=_interpreted_scores,
    add_product=_interpreted_add_product,
    transforms=lambda width, dtype: (),
)
"""The same in plain arrays."""
