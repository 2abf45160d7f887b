"""The key tiles that a thread block of the attention kernel goes through, and which of their slots hold keys.

Committed keys come from pages, in tiles at absolute positions; those of this step come behind them, in tiles counted
from the row's first token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tuning import Tuning

STAGED_ALIGNMENT = 8
"""Rows at whose multiples a bulk copy may begin in an array that lies in tiles of eight rows."""

META = 7
"""Numbers that a query tile comes with; see `attention`."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """What all query tiles have in common.

    Attributes:
        group: Heads that share a KV head.
        scale: Factor on the scores, positive.
        window: Keys that a query sees, itself included; None for all.
        softcap: A scaled score s becomes softcap * tanh(s / softcap); None leaves it.
        ring: Blocks that each place owns, in which case the table isn't read.
    """

    group: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    ring: int | None = None


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of the pages; a tile is brought by `copies` copies of `copied` slots each."""

    num_blocks: int
    kv_heads: int
    block_size: int
    num_columns: int
    key_tile: int

    @property
    def copied(self) -> int:
        """Slots of a copy."""
        return min(self.block_size, self.key_tile)

    @property
    def copies(self) -> int:
        """Copies of a tile."""
        return self.key_tile // self.copied


@dataclasses.dataclass(frozen=True)
class Extent:
    """A tile's position, and from there on the begin and the end of its keys, and whether each copy is a hole."""

    position: jax.Array
    begin: jax.Array
    end: jax.Array
    holes: tuple[jax.Array, ...]
    copied: int

    def is_key(self, number: jax.Array) -> jax.Array:
        """Whether slots of the tile hold keys, by their numbers."""
        result = (number >= self.begin) & (number < self.end)
        for i, hole in enumerate(self.holes):
            end = jnp.where(hole, (i + 1) * self.copied, 0)
            result &= (number < i * self.copied) | (number >= end)
        return result


@dataclasses.dataclass(frozen=True)
class Walk:
    """A split's steps: first `page_steps` tiles of pages from tile `begin` on, then those of staged tokens."""

    layer: Layer
    tuning: Tuning
    pool: Pool
    table: Any
    place: jax.Array
    past: jax.Array
    first: jax.Array
    count: jax.Array
    staged_start: jax.Array
    low: jax.Array
    has_holes: jax.Array
    begin: jax.Array
    page_steps: jax.Array
    low_staged: jax.Array
    steps: jax.Array

    @classmethod
    def of(
        cls, layer: Layer, tuning: Tuning, pool: Pool, table: Any, meta: list[jax.Array], split: jax.Array
    ) -> Walk:
        """That of a query tile's split, by the tile's `META` numbers."""
        place, past, first, count, staged_start, low, has_holes = meta
        first_tile = lax.div(jnp.minimum(low, past), tuning.key_tile)
        page_tiles = pl.cdiv(past, tuning.key_tile) - first_tile
        share = pl.cdiv(page_tiles, tuning.splits) if tuning.split_tiles is None else tuning.split_tiles
        begin = jnp.minimum(split * share, page_tiles)
        page_steps = jnp.where(count > 0, jnp.minimum(begin + share, page_tiles) - begin, 0)
        # The first split, which every row has, takes this step's keys too.
        low_staged = lax.div(jnp.maximum(low - past, 0), STAGED_ALIGNMENT) * STAGED_ALIGNMENT
        num_staged = jnp.where((split == 0) & (count > 0), first + count - past - low_staged, 0)
        steps = page_steps + pl.cdiv(num_staged, tuning.staged_tile)
        return cls(
            layer=layer,
            tuning=tuning,
            pool=pool,
            table=table,
            place=place,
            past=past,
            first=first,
            count=count,
            staged_start=staged_start,
            low=low,
            has_holes=has_holes,
            begin=begin + first_tile,
            page_steps=page_steps,
            low_staged=low_staged,
            steps=steps,
        )

    def nth_staged(self, step: jax.Array) -> jax.Array:
        """The row's token at which a step behind the pages begins."""
        return self.low_staged + (step - self.page_steps) * self.tuning.staged_tile

    def blocks(self, step: jax.Array) -> list[jax.Array]:
        """The block of each copy of a step through the pages; a hole's is outside the pool."""
        column = lax.div((self.begin + step) * self.tuning.key_tile, self.pool.block_size)
        if self.layer.ring is not None:
            return [
                self.place * self.layer.ring + lax.rem(column + i, self.layer.ring)
                for i in range(self.pool.copies)
            ]
        last = self.pool.num_columns - 1
        return [self.table[self.place, jnp.minimum(column + i, last)] for i in range(self.pool.copies)]

    def whole_steps(self) -> jax.Array:
        """How many steps from the first on have keys in all slots, in a layer without a window and a ring."""
        whole = jnp.clip(lax.div(self.past, self.tuning.key_tile) - self.begin, 0, self.page_steps)
        return jnp.where(self.has_holes > 0, 0, whole)

    def extent(self, step: jax.Array) -> Extent:
        """Where a step's keys lie."""
        in_pages = step < self.page_steps
        low, past, ring = self.low, self.past, self.layer.ring
        oldest = low if ring is None else jnp.maximum(low, past - ring * self.pool.block_size)
        position = jnp.where(
            in_pages, (self.begin + step) * self.tuning.key_tile, past + self.nth_staged(step)
        )
        begin = jnp.where(in_pages, oldest, jnp.maximum(low, past))
        last = jnp.minimum(self.first + self.count, position + self.tuning.staged_tile)
        end = jnp.where(in_pages, past, last)
        holes: tuple[jax.Array, ...] = ()
        if ring is None:
            holes = tuple(
                in_pages & (self.has_holes > 0) & ((block < 0) | (block >= self.pool.num_blocks))
                for block in self.blocks(jnp.where(in_pages, step, 0))
            )
        return Extent(position, begin - position, end - position, holes, self.pool.copied)
