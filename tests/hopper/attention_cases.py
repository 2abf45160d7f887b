"""The attention kernel as the Hopper checks compile it: decode and prefill of each head size."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import QueryTiles, best_tile_size, max_query_tiles, paged_attention


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A step of `rows` rows, or of `tokens` tokens in them, over a pool."""

    head_dim: int
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    rows: int = 32
    tokens: int = 0
    columns: int = 512
    num_blocks: int = 4096
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    ring: int | None = None
    sinks: bool = False
    batch_invariant: bool = False

    @property
    def tile_size(self) -> int:
        """Queries a tile."""
        return best_tile_size(self.num_heads, self.num_kv_heads, self.head_dim) if self.tokens else 1

    def function(self, query, staged, pages, block_table, tiles, sinks=None):
        """`paged_attention` with the case's options."""
        return paged_attention(
            query,
            staged,
            pages,
            block_table,
            tiles,
            sinks=sinks,
            tile_size=self.tile_size,
            scale=self.head_dim**-0.5,
            window=self.window,
            softcap=self.softcap,
            ring=self.ring,
            backend="mosaic_gpu",
            batch_invariant=self.batch_invariant,
        )

    @functools.cached_property
    def shapes(self) -> tuple:
        """Of the arguments of `function`."""
        tokens = self.tokens or self.rows
        tiles = max_query_tiles(tokens, self.rows, self.tile_size)

        def array(*shape: int, dtype: str = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        per_tile = [array(tiles, dtype="int32")] * 5
        shapes = (
            array(tokens, self.num_heads, self.head_dim),
            array(tokens, 2, self.num_kv_heads, self.head_dim),
            array(self.num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim),
            array(self.rows, self.columns, dtype="int32"),
            QueryTiles(*per_tile, lane=array(tokens, dtype="int32"), num_key_tiles=array(dtype="int32")),
        )
        return (*shapes, array(self.num_heads, dtype="float32")) if self.sinks else shapes


HEAD_SIZES = (64, 80, 96, 128, 256)
CASES = {
    **{f"decode, heads of {size}": AttentionCase(size) for size in HEAD_SIZES},
    **{f"prefill, heads of {size}": AttentionCase(size, tokens=2048) for size in HEAD_SIZES},
    "decode, everything": AttentionCase(128, window=1000, softcap=30.0, ring=70, sinks=True),
    "decode, fixed split": AttentionCase(128, batch_invariant=True),
    "decode, groups of 7, float16": AttentionCase(64, 14, 2, dtype="float16"),
    "decode, blocks of 256": AttentionCase(128, block_size=256, columns=64, num_blocks=256),
    "prefill, window": AttentionCase(128, tokens=2048, window=4096),
}
