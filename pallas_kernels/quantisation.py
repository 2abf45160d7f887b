"""Quantised keys and values: codes of 8 bits and one float32 scale for each row of head_dim elements.

The scale puts the largest element on the largest code, so there is no zero point and nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST_CODE = {np.dtype(np.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0}
"""Types of codes, with the largest magnitude that each is used for; int8 leaves -128 out."""


def quantise(
    rows: jax.Array, dtype: np.dtype, *, as_column: Callable[[jax.Array], jax.Array] = lambda x: x[..., None]
) -> tuple[jax.Array, jax.Array]:
    """Quantises the last axis; a row's element is near code * scale.

    With m the largest magnitude of the row and c that of the codes, scale = max(m / c, 2^-126), which keeps the scale
    and its inverse normal. The error is at most scale / 2 for int8, and for float8_e4m3fn the larger of |x| / 16 and
    scale / 1024, both up to float32 rounding. A row that holds a NaN or an infinity reads back as NaN throughout.

    Args:
        rows: float[..., n].
        dtype: A key of `LARGEST_CODE`.
        as_column: Repeats float32[...] along a last axis; for kernels, which need a layout there.

    Returns:
        dtype[..., n] codes, and float32[...] scales.
    """
    largest = LARGEST_CODE[np.dtype(dtype)]
    rows = rows.astype(jnp.float32)
    smallest = float(np.finfo(np.float32).tiny)
    # As bits, which order like magnitudes and put NaN on top: XLA's maximum of floats on CPU may lose a NaN.
    magnitude_bits = jnp.max(lax.bitcast_convert_type(jnp.abs(rows), jnp.int32), axis=-1)
    magnitude = lax.bitcast_convert_type(magnitude_bits, jnp.float32)
    # Not less than infinity is NaN too.
    scale = jnp.where(magnitude < np.inf, jnp.maximum(magnitude * (1.0 / largest), smallest), np.nan)
    codes = rows * as_column(1.0 / scale)
    if np.issubdtype(dtype, np.integer):
        codes = jnp.round(codes)
    return codes.astype(dtype), scale
