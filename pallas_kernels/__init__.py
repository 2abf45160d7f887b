"""Paged attention for JAX, usable without `jaxengine`: kernels for NVIDIA GPUs, and plain JAX for every platform."""

from pallas_kernels.attention import attention_backend, best_tile_size, paged_attention
from pallas_kernels.backends import Backend
from pallas_kernels.exact_attention import KEY_TILE
from pallas_kernels.publication import publication_backend, publish_kv, publish_kv_quantised
from pallas_kernels.quantisation import quantise
from pallas_kernels.tiles import QueryTiles, make_query_tiles, max_query_tiles

__all__ = [
    "KEY_TILE",
    "Backend",
    "QueryTiles",
    "attention_backend",
    "best_tile_size",
    "make_query_tiles",
    "max_query_tiles",
    "paged_attention",
    "publication_backend",
    "publish_kv",
    "publish_kv_quantised",
    "quantise",
]
