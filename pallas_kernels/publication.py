"""Publication: a step's staged keys and values go into the slots of all layers' pages, in place if donated.

On a GPU a Mosaic GPU kernel does it in one launch for many layers, elsewhere a scatter of XLA a layer. Both write the
same elements and touch no other.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backends import Backend, Shaped, choose, interpretation
from pallas_kernels.quantisation import LARGEST_CODE, quantise

_FROM_HOPPER_ON = ("9.", "10.", "11.", "12.")


def publish_kv(
    pages: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    block: jax.Array | Sequence[jax.Array],
    slot: jax.Array,
    *,
    backend: Backend | None = None,
) -> tuple[jax.Array, ...]:
    """Writes token t of every layer to slot `slot[t]` of block `block[t]`, and leaves the rest bit for bit.

    A token whose block or slot lies outside is dropped: padding, rejected drafts. The others must go to different
    slots, else it is undefined which one stays. Donate `pages` to the jit around it, or XLA copies them first. Block,
    slot and row are each 32-bit numbers and never multiplied in 32 bits, so a layer may have more than 2^31 elements.

    Args:
        pages: A layer each, dtype[num_blocks, 2, num_kv_heads, block_size, head_dim]; layers may differ.
        staged: A layer each, dtype[tokens, 2, num_kv_heads, head_dim].
        block: int32[tokens], or one such array a layer for layers that own different blocks.
        slot: int32[tokens].
        backend: None takes the kernel on GPUs from Hopper on and XLA elsewhere, and warns once where the kernel does
            not take the shapes.

    Returns:
        The pages after it.

    Raises:
        ValueError: The shapes or types disagree, or `backend` is "mosaic_gpu" or "interpret" and the kernel does not
            take the shapes.
    """
    return _publish(pages, (), staged, block, slot, backend)[0]


def publication_backend(
    pages: Sequence[Shaped], staged: Sequence[Shaped], backend: Backend | None = None
) -> Backend:
    """Returns where `publish_kv` runs a call with arrays of these shapes and types, which need not exist.

    Args:
        pages: As in `publish_kv`; the number of blocks doesn't matter.
        staged: As in `publish_kv`; the number of tokens doesn't matter.
        backend: The caller's choice.

    Raises:
        ValueError: There is no such backend, or the kernel is asked for and does not take the shapes.
    """
    return _backend(pages, (), staged, backend)


def publish_kv_quantised(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    block: jax.Array | Sequence[jax.Array],
    slot: jax.Array,
    *,
    backend: Backend | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Publishes as `publish_kv` does, each row of head_dim elements as codes and one scale; see `quantise`.

    Args:
        pages: A layer each, int8 or float8_e4m3fn[num_blocks, 2, num_kv_heads, block_size, head_dim].
        scales: A layer each, float32[num_blocks, 2, num_kv_heads, block_size]; the kernel takes up to 2^31 - 1 of them
            a layer.
        staged: A layer each, float[tokens, 2, num_kv_heads, head_dim].
        block: int32[tokens], or one such array a layer.
        slot: int32[tokens].
        backend: As in `publish_kv`.

    Returns:
        The pages and the scales after it.

    Raises:
        ValueError: As in `publish_kv`, or the pages' type is no type of codes.
    """
    if len(scales) != len(pages):
        raise ValueError(
            f"{len(pages)} layers of pages have {len(scales)} layers of scales; give one a layer"
        )
    return _publish(pages, scales, staged, block, slot, backend)


def _publish(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    block: jax.Array | Sequence[jax.Array],
    slot: jax.Array,
    backend: Backend | None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    blocks = tuple(block) if isinstance(block, Sequence) else (block,) * len(pages)
    _check(pages, scales, staged, blocks, slot)
    place = _backend(pages, scales, staged, backend)
    if not slot.shape[0]:
        return tuple(pages), tuple(scales)
    if place == "xla":
        return _publish_xla(pages, scales, staged, blocks, slot)
    return _publish_mosaic(pages, scales, staged, blocks, slot, interpret=place == "interpret")


def _backend(
    pages: Sequence[Shaped], scales: Sequence[Shaped], staged: Sequence[Shaped], backend: Backend | None
) -> Backend:
    return choose(backend, "publication", _FROM_HOPPER_ON, functools.partial(_refusal, pages, scales, staged))


def _check(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    blocks: Sequence[jax.Array],
    slot: jax.Array,
) -> None:
    if not len(pages) == len(staged) == len(blocks):
        raise ValueError(
            f"{len(pages)} layers of pages, {len(staged)} staged and {len(blocks)} of blocks; give one a layer"
        )
    num_tokens = slot.shape[0]
    for layer, (held, fresh, block) in enumerate(zip(pages, staged, blocks, strict=True)):
        num_blocks, kinds, heads, size, head_dim = held.shape
        if fresh.shape != (num_tokens, kinds, heads, head_dim) or block.shape != (num_tokens,):
            raise ValueError(
                f"layer {layer} has pages {held.shape}, staged {fresh.shape} and blocks {block.shape} for "
                f"{num_tokens} slots; give staged [tokens, 2, num_kv_heads, head_dim] and blocks [tokens]"
            )
        if not scales and held.dtype != fresh.dtype:
            raise ValueError(
                f"layer {layer} stages {fresh.dtype} for pages of {held.dtype}; cast it, or use publish_kv_quantised"
            )
        if scales and np.dtype(held.dtype) not in LARGEST_CODE:
            raise ValueError(f"layer {layer} has pages of {held.dtype}; codes are int8 or float8_e4m3fn")
        if scales and (
            scales[layer].shape != (num_blocks, kinds, heads, size) or scales[layer].dtype != jnp.float32
        ):
            raise ValueError(
                f"layer {layer} has scales {scales[layer].dtype}{scales[layer].shape}; give float32 in the shape of "
                "the pages without head_dim"
            )


def _publish_xla(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    blocks: Sequence[jax.Array],
    slot: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    def write(held: jax.Array, fresh: jax.Array, block: jax.Array) -> jax.Array:
        # An index below zero would count from the end.
        outside = (block < 0) | (slot < 0)
        block = jnp.where(outside, held.shape[0], block)
        # XLA on CPU widens the whole pool to scatter into these types, and changes NaNs by it.
        emulated = held.dtype == jnp.bfloat16 or (held.dtype.itemsize == 1 and held.dtype.kind != "i")
        if not emulated:
            return held.at[block, :, :, slot].set(fresh, mode="drop")
        unsigned = jnp.dtype(f"uint{8 * held.dtype.itemsize}")
        as_bits = lax.bitcast_convert_type(held, unsigned)
        after = as_bits.at[block, :, :, slot].set(lax.bitcast_convert_type(fresh, unsigned), mode="drop")
        return lax.bitcast_convert_type(after, held.dtype)

    if not scales:
        return tuple(map(write, pages, staged, blocks)), ()
    quantised = [quantise(fresh, held.dtype) for fresh, held in zip(staged, pages, strict=True)]
    codes, fresh_scales = zip(*quantised, strict=True)
    return tuple(map(write, pages, codes, blocks)), tuple(map(write, scales, fresh_scales, blocks))


def _publish_mosaic(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    blocks: Sequence[jax.Array],
    slot: jax.Array,
    *,
    interpret: bool,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    mosaic = _mosaic()
    geometries = _geometries(pages, scales, staged)
    after, after_scales = list(pages), list(scales)
    for geometry in dict.fromkeys(geometries):
        layers = [i for i, other in enumerate(geometries) if other == geometry]
        written, written_scales = mosaic.publish(
            geometry,
            [pages[i] for i in layers],
            [scales[i] for i in layers] if scales else [],
            [staged[i] for i in layers],
            [blocks[i] for i in layers],
            slot,
            interpret=interpretation() if interpret else False,
        )
        for i, layer in enumerate(layers):
            after[layer] = written[i]
            if scales:
                after_scales[layer] = written_scales[i]
    return tuple(after), tuple(after_scales)


def _geometries(pages: Sequence[Shaped], scales: Sequence[Shaped], staged: Sequence[Shaped]) -> list[Any]:
    return [
        _mosaic().Geometry(
            rows=held.shape[1] * held.shape[2],
            head_dim=held.shape[4],
            block_size=held.shape[3],
            staged=np.dtype(fresh.dtype),
            kept=np.dtype(held.dtype),
            quantised=bool(scales),
        )
        for held, fresh in zip(pages, staged, strict=True)
    ]


def _refusal(
    pages: Sequence[Shaped], scales: Sequence[Shaped], staged: Sequence[Shaped], backend: Backend
) -> str | None:
    reasons = [geometry.refusal() for geometry in _geometries(pages, scales, staged)]
    return next((reason for reason in reasons if reason is not None), _mosaic().scale_refusal(scales))


def _mosaic() -> Any:
    # Pallas takes a second to import, which a CPU need not spend.
    return importlib.import_module("pallas_kernels.mosaic.publication")
