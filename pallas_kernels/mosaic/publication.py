"""The Mosaic GPU kernel of publication: bulk copies of a step's rows into the pages, one launch for up to 15 layers.

A thread block takes a few tokens of one layer: one bulk copy brings them into shared memory, and one bulk copy a token
writes its rows, of all kinds and heads, to its slot. Quantisation happens in registers between the two. The pages are
references that the kernel writes to, so XLA aliases them and copies nothing.

Addresses: a plain copy names block, slot and rows, each below 2^31, and the hardware multiplies them in 64 bits, so
that a layer's pages may have more than 2^31 elements. With quantisation a bulk copy names block and slot by one number,
and scales are stored one by one with 32-bit addresses; both stay below the number of the layer's scales, hence the
limit on that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantisation import quantise

LAYERS_PER_LAUNCH = 15
"""Two tensor maps of 128 bytes a layer, and its pointers, stay below the 4 KiB of arguments that every driver takes."""

_SHARED_BYTES = 200 * 1024
_TILE_BYTES = 16 * 1024
_BOX = 256
_COPY_BYTES, _ALIGNED_BYTES = 16, 128
_MATRIX_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What layers of one launch have in common.

    Attributes:
        rows: Rows of head_dim elements that a token has in a layer: one a kind and head.
        head_dim: Elements of a row.
        block_size: Slots of a block.
        staged: Type of the staged rows.
        kept: Type of the rows in pages; codes if `quantised`.
        quantised: Whether rows are quantised on the way.
    """

    rows: int
    head_dim: int
    block_size: int
    staged: np.dtype
    kept: np.dtype
    quantised: bool

    @property
    def tile(self) -> int:
        """Tokens that a thread block takes, when there are so many."""
        # A token's rows begin at a multiple of 128 bytes in shared memory, or alone at its start.
        if self.rows * self.head_dim * self.kept.itemsize % _ALIGNED_BYTES:
            return 1
        most = _TILE_BYTES // (self.rows * self.head_dim * self.staged.itemsize)
        return max(1, min(most, (_MATRIX_ROWS if self.quantised else _BOX) // self.rows))

    def padded_rows(self, tile: int) -> int:
        """Rows of shared memory for `tile` tokens."""
        rows = tile * self.rows
        return -(-rows // _MATRIX_ROWS) * _MATRIX_ROWS if self.quantised else rows

    def refusal(self) -> str | None:
        """Returns why the kernel does not take these shapes, None if it does."""
        sizes = {self.staged.itemsize, self.kept.itemsize}
        if any(self.head_dim * size % _COPY_BYTES for size in sizes):
            return f"a row of head_dim {self.head_dim} is not a multiple of {_COPY_BYTES} bytes"
        if self.head_dim > _BOX:
            return f"head_dim {self.head_dim} is over {_BOX}"
        if self.rows > _BOX:
            return f"{self.rows // 2} KV heads are over {_BOX // 2}"
        if self.padded_rows(1) * self.head_dim * sum(sizes) > _SHARED_BYTES:
            return f"{self.rows // 2} KV heads of {self.head_dim} do not fit into shared memory"
        return None


def publish(
    geometry: Geometry,
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    block: Sequence[jax.Array],
    slot: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Returns the layers' pages and scales with the staged tokens in their slots.

    Args:
        geometry: That of every layer; `refusal` gives None.
        pages: A layer each, kept[num_blocks, 2, num_kv_heads, block_size, head_dim].
        scales: A layer each, float32[num_blocks, 2, num_kv_heads, block_size]; none unless quantised.
        staged: A layer each, staged[tokens, 2, num_kv_heads, head_dim].
        block: A layer each, int32[tokens]; layers that share the same array read it once.
        slot: int32[tokens].
        interpret: False, or Pallas' parameters for running on a CPU.
    """
    launches = -(-len(pages) // LAYERS_PER_LAUNCH)
    size = -(-len(pages) // launches)
    after: list[jax.Array] = []
    after_scales: list[jax.Array] = []
    for first in range(0, len(pages), size):
        part = slice(first, first + size)
        tables = {id(table): table for table in block[part]}
        written, written_scales = _launch(
            pages[part],
            scales[part],
            staged[part],
            list(tables.values()),
            slot,
            geometry=geometry,
            table_of=tuple(list(tables).index(id(table)) for table in block[part]),
            interpret=interpret,
        )
        after += written
        after_scales += written_scales
    return tuple(after), tuple(after_scales)


# References in a memory space exist under jit only.
@functools.partial(jax.jit, static_argnames=("geometry", "table_of", "interpret"))
def _launch(
    pages: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    staged: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    slot: jax.Array,
    *,
    geometry: Geometry,
    table_of: tuple[int, ...],
    interpret: Any,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    rows, head_dim, num_layers = geometry.rows, geometry.head_dim, len(pages)
    num_tokens = slot.shape[0]
    tile = min(geometry.tile, num_tokens)
    padded_rows = geometry.padded_rows(tile)
    # WGMMA's layout holds whole rows in four neighbouring lanes; the interpreter of JAX 0.10 knows no layouts.
    in_layout: Callable[[jax.Array], jax.Array] = (
        (lambda x: x) if interpret else functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA)
    )

    def body(slot_ref: Any, *refs: Any) -> None:
        table_refs, rest = refs[: len(tables)], refs[len(tables) :]
        staged_refs, page_refs = rest[:num_layers], rest[num_layers : 2 * num_layers]
        scale_refs = rest[2 * num_layers :]

        def with_scratch(fresh: Any, barrier: Any, codes: Any = None, code_scales: Any = None) -> None:
            first = lax.axis_index("tile") * tile
            # The last tile begins earlier instead of reading past the end, and leaves out what another tile writes.
            start = jnp.minimum(first, num_tokens - tile)

            kept = codes if geometry.quantised else fresh

            def quantise_tile() -> None:
                for part in range(0, padded_rows, _MATRIX_ROWS):
                    at = pl.ds(part, _MATRIX_ROWS)
                    codes[at], code_scales[at] = quantise(
                        in_layout(fresh[at]),
                        geometry.kept,
                        as_column=lambda x: lax.broadcast_in_dim(x, (_MATRIX_ROWS, head_dim), (0,)),
                    )
                plgpu.commit_smem()

            def read_tile(layer: int) -> None:
                plgpu.copy_gmem_to_smem(
                    staged_refs[layer].at[pl.ds(start * rows, tile * rows)],
                    fresh.at[pl.ds(0, tile * rows)],
                    barrier,
                )

            def write_tile(layer: int) -> None:
                table_ref, page_ref = table_refs[table_of[layer]], page_refs[layer]
                to = [(table_ref[start + i], slot_ref[start + i]) for i in range(tile)]
                for i, (to_block, to_slot) in enumerate(to):
                    inside = (to_block >= 0) & (to_block < page_ref.shape[0])
                    inside &= (to_slot >= 0) & (to_slot < geometry.block_size)
                    pl.when(inside & (start + i >= first))(
                        functools.partial(write_token, layer, i, to_block, to_slot)
                    )

            def write_token(layer: int, i: int, to_block: jax.Array, to_slot: jax.Array) -> None:
                plgpu.copy_smem_to_gmem(
                    kept.at[pl.ds(i * rows, rows)], page_refs[layer].at[to_block, :, to_slot, :]
                )
                if geometry.quantised:

                    def write_scale(row: jax.Array, _: None) -> None:
                        scale_refs[layer][to_block, row, to_slot] = code_scales[i * rows + row]

                    lax.fori_loop(0, rows, write_scale, None)

            def of_layer(write: Callable[[int], None]) -> None:
                # References can't be chosen by a number, so each layer has its branch, of copies only.
                for layer in range(num_layers):
                    pl.when(lax.axis_index("layer") == layer)(functools.partial(write, layer))

            of_layer(read_tile)
            plgpu.barrier_wait(barrier)
            if geometry.quantised:
                quantise_tile()
            of_layer(write_tile)
            plgpu.wait_smem_to_gmem(0)

        shared = (padded_rows, head_dim)
        scratch = {"fresh": plgpu.SMEM(shared, geometry.staged), "barrier": plgpu.Barrier()}
        if geometry.quantised:
            scratch |= {
                "codes": plgpu.SMEM(shared, geometry.kept),
                "code_scales": plgpu.SMEM((padded_rows,), jnp.float32),
            }
        pl.run_scoped(with_scratch, **scratch)

    def as_ref(array: jax.Array, *row: int) -> Any:
        return jax.new_ref(
            array.reshape(array.shape[0], rows, geometry.block_size, *row), memory_space=plgpu.GMEM
        )

    page_refs = [as_ref(layer, head_dim) for layer in pages]
    scale_refs = [as_ref(layer) for layer in scales]
    # `plgpu.kernel` of JAX 0.10 refuses references as arguments under jit.
    pl.kernel(
        body,
        mesh=plgpu.Mesh(grid=(-(-num_tokens // tile), num_layers), grid_names=("tile", "layer")),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        name="publish_kv",
    )(slot, *tables, *(layer.reshape(-1, head_dim) for layer in staged), *page_refs, *scale_refs)

    def values(refs: list[Any], before: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, before, strict=True))

    return values(page_refs, pages), values(scale_refs, scales)


def scale_refusal(scales: Sequence[jax.Array]) -> str | None:
    """Returns why the kernel does not take scales of these sizes, None if it does."""
    most = max((math.prod(layer.shape) for layer in scales), default=0)
    if most < 2**31:
        return None
    return f"{most} scales a layer are over 2^31 - 1, which 32-bit addresses reach"
