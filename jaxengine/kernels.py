"""Which form of attention and of publication an engine runs, settled once when its state is made.

A layer's kernel is taken or not by its shapes alone, so a mixture of layers may run in both forms. What is settled is a
value: it rides in the state, and programs are compiled for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxengine.config import EngineConfig
from onnx_import import AttentionSpec
from pallas_kernels import Backend, attention_backend, best_tile_size, publication_backend

DECODE_TILE, PREFILL_TILE = 1, 16
"""Queries of an attention tile in plain JAX; a kernel's tiles of prefill are as large as its layers allow."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Where the parts of a step run that have a kernel.

    Attributes:
        attention: Backend of each layer's attention.
        publication: Backend of the write into the pages, of all layers.
        prefill_tile: Queries of an attention tile unless every row has one.
        batch_invariant: Whether a kernel's way of summing must not depend on the other rows.
    """

    attention: tuple[Backend, ...]
    publication: Backend
    prefill_tile: int = PREFILL_TILE
    batch_invariant: bool = False


def plain(layers: Sequence[AttentionSpec]) -> Kernels:
    """Returns what runs everything in plain JAX."""
    return Kernels(tuple("xla" for _ in layers), "xla")


def choose_kernels(layers: Sequence[AttentionSpec], config: EngineConfig) -> Kernels:
    """Settles where each layer runs on the default device; warns once of a shape that no kernel takes.

    Args:
        layers: The attention layers.
        config: Its block and chunk sizes have to be settled.

    Raises:
        ValueError: `config.backend` is a kernel that does not take some layer.
    """
    size = config.block_size
    pages, staged, attention, tiles = [], [], [], []
    for spec in layers:
        query, fresh, held = (
            jax.ShapeDtypeStruct((1, *shape, spec.head_dim), spec.kv_dtype)
            for shape in ((spec.num_heads,), (2, spec.num_kv_heads), (2, spec.num_kv_heads, size))
        )
        # Tiles of one query are for steps of one token a row.
        tile = max(best_tile_size(spec.num_heads, spec.num_kv_heads, spec.head_dim), DECODE_TILE + 1)
        backend = attention_backend(query, fresh, held, tile, config.backend)
        attention.append(backend)
        staged.append(fresh)
        pages.append(held)
        if backend != "xla":
            tiles.append(tile)
    # A row fills no more than it can have in a step.
    most = max(min(config.max_scheduled_tokens, config.chunk_size or 2**31), PREFILL_TILE)
    return Kernels(
        attention=tuple(attention),
        publication=publication_backend(pages, staged, config.backend),
        prefill_tile=min(*tiles, most) if tiles else PREFILL_TILE,
        batch_invariant=config.deterministic,
    )
