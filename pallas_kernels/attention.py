"""Paged attention of a packed step: a Mosaic GPU kernel where it can run, the exact form in plain JAX elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels.backends import Backend, Shaped, choose, interpretation
from pallas_kernels.exact_attention import exact_attention
from pallas_kernels.quantisation import LARGEST_CODE
from pallas_kernels.tiles import QueryTiles

_HOPPER = ("9.0",)
_LARGEST_TILE = 128
_HALVES = ("bfloat16", "float16")
_FEWEST_SCALES = 16
"""Slots of a block at least if they have scales: both kinds' are copied at once, 128 bytes or more."""


def paged_attention(
    query: jax.Array,
    staged: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    tiles: QueryTiles,
    *,
    tile_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: int | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    backend: Backend | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Causal attention of packed rows over their committed pages and their staged tokens.

    With a ring a row keeps its newest ring * block_size committed keys only, position p in slot p mod (ring *
    block_size) of the blocks that belong to its place.

    XLA's form is exact: a query's bits depend on its row alone, not on the batch, padding, block size or how the prompt
    was cut. The kernel multiplies in the queries' type and sums in float32; with `batch_invariant` its bits depend
    on the row, the width of the table, and where the row's committed keys end.

    Args:
        query: dtype[tokens, num_heads, head_dim]; rotary already applied.
        staged: dtype[tokens, 2, num_kv_heads, head_dim], this step's keys and values in the format of the pages.
        pages: dtype[num_blocks, 2, num_kv_heads, block_size, head_dim]; only read. There may be more than 2^31
            elements, but not rows of head_dim.
        block_table: int32[places, columns]; an entry outside [0, num_blocks) is a hole and is never read.
        tiles: The step's query tiles.
        tile_size: Queries a tile; 1 means that every row has one token. `best_tile_size` gives the kernel's.
        scale: Factor on the scores.
        window: Keys that a query sees, itself included: those at max(0, p - window + 1) .. p; None for all up to p.
        softcap: A scaled score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: float[num_heads], a logit a head that takes part in the softmax and brings no value; never capped.
        ring: Blocks that each place owns, block j of place p at p * ring + j; the block table is not read then. None
            takes blocks from the table.
        scales: For staged and pages of codes, int8 or float8_e4m3fn, those of the staged tokens, float32[tokens, 2,
            num_kv_heads], and of the pages, float32[num_blocks, 2, num_kv_heads, block_size]; an element is
            float32(code) * scale. See `quantise`.
        backend: None takes the kernel on Hopper GPUs and XLA elsewhere, and warns once where the kernel does not take
            the shapes.
        batch_invariant: Whether the kernel's way of summing must not depend on the other rows.

    Returns:
        query's dtype[tokens, num_heads, head_dim].

    Raises:
        ValueError: There is no such backend, "mosaic_gpu" or "interpret" is given and the kernel does not take the
            shapes, the pool has too many rows, the scale isn't positive, or codes and scales don't fit each other.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = pages.shape
    if scale <= 0:
        raise ValueError(f"the scale is {scale}; give a positive one")
    if num_blocks * 2 * num_kv_heads * block_size > np.iinfo(np.int32).max:
        raise ValueError(
            f"pages of {num_blocks} blocks have more than 2^31 rows of head_dim, which 32 bits can't count; "
            "take fewer blocks"
        )
    _check_scales(staged, pages, scales)
    place = attention_backend(query, staged, pages, tile_size, backend)
    options: dict[str, Any] = {"tile_size": tile_size}
    if place == "xla":
        options |= {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "ring": ring}
        options["scales"] = scales
        return exact_attention(query, staged, pages, block_table, tiles, **options)

    # Only where it is used: Mosaic GPU takes a second to import.
    from pallas_kernels.mosaic import packing, units
    from pallas_kernels.mosaic.walk import Layer
    from pallas_kernels.tuning import attention_tuning

    group = query.shape[1] // num_kv_heads
    reach = block_size * (block_table.shape[1] if ring is None else ring)
    tuning = attention_tuning(
        head_dim,
        tile_size * group,
        tiles.place.shape[0] * num_kv_heads,
        reach if window is None else min(reach, window + _LARGEST_TILE),
        batch_invariant=batch_invariant,
    )
    return packing.ragged_attention(
        query,
        staged,
        pages,
        block_table,
        tiles,
        sinks,
        scales,
        tile_size=tile_size,
        layer=Layer(group, scale, window, softcap, ring),
        tuning=tuning,
        units=units.INTERPRETED if place == "interpret" else units.TENSOR_CORES,
        interpret=interpretation() if place == "interpret" else False,
    )


def attention_backend(
    query: Shaped, staged: Shaped, pages: Shaped, tile_size: int, backend: Backend | None = None
) -> Backend:
    """Returns where `paged_attention` runs a call with arrays of these shapes and types, which need not exist.

    Args:
        query: As in `paged_attention`, and so are the others.
        staged: The number of tokens doesn't matter.
        pages: The number of blocks doesn't matter.
        tile_size: Queries a tile.
        backend: The caller's choice.

    Raises:
        ValueError: There is no such backend, or the kernel is asked for and does not take the shapes.
    """
    refusal_on = functools.partial(_refusal, query, staged, pages, tile_size)
    return choose(backend, "paged-attention", _HOPPER, refusal_on)


def best_tile_size(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the queries of a tile of prefill for which the kernel reads its keys least often."""
    from pallas_kernels.tuning import most_rows

    return max(most_rows(head_dim) * num_kv_heads // num_heads, 1)


def _check_scales(staged: jax.Array, pages: jax.Array, scales: tuple[jax.Array, jax.Array] | None) -> None:
    if scales is None:
        if np.dtype(pages.dtype) in LARGEST_CODE:
            raise ValueError(f"pages of {pages.dtype} are codes; give their scales")
        return
    if np.dtype(pages.dtype) not in LARGEST_CODE or staged.dtype != pages.dtype:
        raise ValueError(
            f"scales are given for {staged.dtype} staged and {pages.dtype} pages; give both as int8 or both as "
            "float8_e4m3fn, or no scales"
        )
    for name, array, given in (("staged", staged, scales[0]), ("pages", pages, scales[1])):
        if given.dtype != np.float32 or given.shape != array.shape[:-1]:
            raise ValueError(
                f"{name} {array.shape} have scales {given.dtype}{given.shape}; give float32 in the same shape without "
                "head_dim"
            )


def _refusal(query: Shaped, staged: Shaped, pages: Shaped, tile_size: int, backend: Backend) -> str | None:
    """Why the kernel does not take a call, None if it does."""
    from pallas_kernels.mosaic.units import swizzle_of
    from pallas_kernels.tuning import most_rows

    block_size, head_dim = pages.shape[-2:]
    group = query.shape[1] // pages.shape[2]
    # The interpreter multiplies anything, which shows the algorithm without the rounding of short types.
    types = (*_HALVES, "float32") if backend == "interpret" else _HALVES
    quantised = np.dtype(pages.dtype) in LARGEST_CODE
    fitting = quantised or query.dtype == staged.dtype == pages.dtype
    if not fitting or str(query.dtype) not in types:
        return f"it takes one of {', '.join(types)}, not {query.dtype} queries and {pages.dtype} pages"
    if swizzle_of(head_dim, 2) is None or most_rows(head_dim) == 0:
        return f"it takes heads in steps of 16 elements up to 256, not {head_dim}"
    if tile_size * group > most_rows(head_dim):
        return f"it takes {most_rows(head_dim)} packed queries a tile, not {tile_size} of {group} heads each"
    if any(block_size % 8 or (tile % block_size and block_size % tile) for tile in _key_tiles(head_dim)):
        return f"it takes blocks of 8, 16, 32 or multiples of {max(_key_tiles(head_dim))} slots, not {block_size}"
    if quantised and block_size < _FEWEST_SCALES:
        return f"it takes blocks of {_FEWEST_SCALES} slots or more with scales, not {block_size}"
    return None


def _key_tiles(head_dim: int) -> list[int]:
    from pallas_kernels.tuning import table

    return [entry.key_tile for entry in table().attention if entry.head_dim >= head_dim]
