"""Attention over codes of 8 bits as an engine calls it, for compiling: decode, and prefill by two warpgroups."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import QueryTiles, max_query_tiles, paged_attention
from tests.hopper.registered import Registered

_HEADS, _KV_HEADS, _BLOCK = 32, 8, 16


def _attention(tile_size: int, options: dict[str, Any], *arrays: Any) -> jax.Array:
    query, staged, pages, table, tiles, scales = arrays
    return paged_attention(
        query,
        staged,
        pages,
        table,
        tiles,
        tile_size=tile_size,
        scale=0.1,
        scales=scales,
        backend="mosaic_gpu",
        **options,
    )


def _case(
    name: str, code: str, dtype: str, head_dim: int, tile_size: int, tokens: int, **options: Any
) -> Registered:
    rows, columns, blocks = 32, 512, 4096
    tiles = max_query_tiles(tokens, rows, tile_size)

    def array(*shape: int, kind: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    shapes = (
        array(tokens, _HEADS, head_dim, kind=dtype),
        array(tokens, 2, _KV_HEADS, head_dim, kind=code),
        array(blocks, 2, _KV_HEADS, _BLOCK, head_dim, kind=code),
        array(rows, columns),
        QueryTiles(*[array(tiles)] * 5, array(tokens), array()),
        (
            array(tokens, 2, _KV_HEADS, kind="float32"),
            array(blocks, 2, _KV_HEADS, _BLOCK, kind="float32"),
        ),
    )
    return Registered(
        f"{name} over {code}, {dtype}, {head_dim}",
        functools.partial(_attention, tile_size, options),
        shapes,
    )


CASES = tuple(
    _case(name, code, dtype, head_dim, tile_size, tokens, **options)
    for code in ("int8", "float8_e4m3fn")
    for name, dtype, head_dim, tile_size, tokens, options in (
        ("decode", "bfloat16", 128, 1, 32, {}),
        ("decode", "float16", 256, 1, 32, {}),
        ("prefill", "bfloat16", 128, 32, 512, {}),
        ("prefill", "float16", 80, 32, 512, {}),
        ("window", "bfloat16", 64, 32, 512, {"window": 1000, "ring": 64, "softcap": 30.0}),
    )
)
