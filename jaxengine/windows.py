"""Rings: what a windowed attention layer keeps of each resident, a few blocks that stay the same whatever its length.

A query at position p sees no key before p - W + 1. A step of at most C tokens a row writes C positions while its first
query still reads the W - 1 before them. So R = ceil((C + W - 1) / B) blocks of B slots are enough: position p lives in
slot p mod (R * B), and a step only writes over positions that no query sees any more.

A request's ring is that of its place, as its fixed states are. It comes and goes with the place, so there is nothing to
hand out, and nothing is cleared: attention hides what a slot held before.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxengine.blocks import blocks_for
from jaxengine.config import EngineConfig
from jaxengine.errors import ContractError
from onnx_import import AttentionSpec

_BLOCK_AXES = 4


def ring_blocks(
    layers: Sequence[AttentionSpec], config: EngineConfig, longest: int
) -> tuple[int | None, ...]:
    """Returns how many blocks each layer's rings have, None where it keeps whole sequences in blocks of the pool.

    Rings need a limit on the tokens of a row and at least one layer without a window. A ring that would hold the
    longest session is none.

    Args:
        layers: The attention layers.
        config: Its chunk and block sizes, once they are settled, decide.
        longest: Tokens of the longest session.
    """
    chunk, size = config.chunk_size, config.block_size
    if chunk is None or all(spec.window is not None for spec in layers):
        return (None,) * len(layers)
    most = int(blocks_for(longest, size))
    rings = [
        None if spec.window is None else int(blocks_for(chunk + spec.window - 1, size)) for spec in layers
    ]
    return tuple(ring if ring is not None and ring < most else None for ring in rings)


def pages_shape(spec: AttentionSpec, ring: int | None, config: EngineConfig) -> tuple[int, ...]:
    """Returns the shape of a layer's pages: the pool's blocks, or the ring of each place; and then that of a block."""
    assert config.num_blocks is not None, "init_state settles it"
    owners = (config.num_blocks,) if ring is None else (config.max_batch_size, ring)
    return (*owners, 2, spec.num_kv_heads, config.block_size, spec.head_dim)


def ring_of(pages: jax.Array) -> int | None:
    """Returns how many blocks the rings in a layer's pages have, None if its pages are the pool's blocks."""
    return None if pages.ndim == 1 + _BLOCK_AXES else pages.shape[1]


def as_blocks(pages: jax.Array) -> jax.Array:
    """Returns a layer's pages as one row of blocks; block j of place p is p * ring + j."""
    return pages.reshape(-1, *pages.shape[-_BLOCK_AXES:])


def bytes_per_slot(pages: jax.Array) -> int:
    """Bytes of a token's keys and values in a layer's pages."""
    kinds, heads, _, head_dim = pages.shape[-_BLOCK_AXES:]
    return kinds * heads * head_dim * pages.dtype.itemsize


def require_room_in_rings(
    layers: Sequence[AttentionSpec], pages: Sequence[jax.Array], num_tokens: int
) -> None:
    """Raises `ContractError` if a row of `num_tokens` would write over what its first query sees in a ring."""
    for spec, held in zip(layers, pages, strict=True):
        ring = ring_of(held)
        if (
            spec.window is not None
            and ring is not None
            and num_tokens + spec.window - 1 > ring * held.shape[-2]
        ):
            raise ContractError(
                f"a row of {num_tokens} tokens would write over what it reads in the ring of attention layer "
                f"{spec.layer}; plan with plan_step"
            )
