"""Paged attention for JAX, usable without `jaxengine`.

Holds the exact form in plain JAX, which runs on every platform; GPU kernels are to join it behind the same functions.
"""

from pallas_kernels.attention import KEY_TILE, paged_attention
from pallas_kernels.tiles import QueryTiles, make_query_tiles, max_query_tiles

__all__ = ["KEY_TILE", "QueryTiles", "make_query_tiles", "max_query_tiles", "paged_attention"]
