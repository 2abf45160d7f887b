"""Ragged steps for attention tests: whole sequences, and the same laid out in pages and staged tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from pallas_kernels import KEY_TILE, make_query_tiles, max_query_tiles, paged_attention, quantise

HOLES = (-1, -(2**31), 2**31 - 1)
"""Table entries outside any pool; tests add the pool's own size, the nearest one."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of the heads and of a block; `dtype` is that of queries and pages."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The usual factor on the scores."""
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}-block{self.block_size}-{self.dtype}"


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a layer may ask beyond causal attention; `sinks` holds a logit a head, `ring` is in blocks."""

    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    ring: int | None = None


PLAIN = Extras()


@dataclasses.dataclass(frozen=True)
class Sequence:
    """query [n, num_heads, head_dim]; key and value [n, num_kv_heads, head_dim]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a step: `count` tokens of a sequence behind `past` committed ones."""

    past: int
    count: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The padded sizes of a compiled step."""

    tokens: int
    tile_size: int
    rows: int = 6
    columns: int = 640
    num_blocks: int = 700

    @property
    def tiles(self) -> int:
        """Query tiles, padding included."""
        return max_query_tiles(self.tokens, self.rows, self.tile_size)


@dataclasses.dataclass(frozen=True)
class Step:
    """The arguments of `paged_attention`, and where each row's tokens lie in the packed step."""

    query: np.ndarray
    staged: np.ndarray
    pages: np.ndarray
    block_table: np.ndarray
    tiles: object
    shape: Shape
    scale: float
    spans: tuple[slice, ...]
    extras: Extras = PLAIN
    scales: tuple[np.ndarray, np.ndarray] | None = None


def to_pages(slots: np.ndarray) -> np.ndarray:
    """Pages in the kernel's layout from [num_blocks, block_size, 2, num_kv_heads, head_dim]."""
    return np.ascontiguousarray(slots.transpose(0, 2, 3, 1, 4))


def from_pages(pages: np.ndarray) -> np.ndarray:
    """The reverse of `to_pages`."""
    return pages.transpose(0, 3, 1, 2, 4)


def random_sequence(rng: np.random.Generator, geometry: Geometry, length: int) -> Sequence:
    """Normal queries, keys and values; the scores spread enough for weights from about 0.01 to 100 times the mean."""

    def draw(heads: int) -> np.ndarray:
        return rng.standard_normal((length, heads, geometry.head_dim)).astype(geometry.dtype)

    return Sequence(draw(geometry.num_heads), draw(geometry.num_kv_heads), draw(geometry.num_kv_heads))


def uneven(rng: np.random.Generator, sequence: Sequence) -> Sequence:
    """Keys and values of unequal magnitudes, so that a scale at the wrong place shows."""
    factors = 4.0 ** rng.integers(-2, 1, (2, *sequence.key.shape[:2], 1))
    key, value = (
        (part * factor).astype(part.dtype)
        for part, factor in zip((sequence.key, sequence.value), factors, strict=True)
    )
    return Sequence(sequence.query, key, value)


def reference(
    sequence: Sequence, row: Row, scale: float, dead: frozenset[int] = frozenset(), extras: Extras = PLAIN
) -> np.ndarray:
    """Plain causal attention of one row in float64: [count, num_heads, head_dim]; none at `dead` positions."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    out = np.empty((row.count, *sequence.query.shape[1:]))
    for i in range(row.count):
        position = row.past + i
        first = 0 if extras.window is None else max(0, position - extras.window + 1)
        seen = [p for p in range(first, position + 1) if p not in dead]
        for head in range(sequence.query.shape[1]):
            keys = sequence.key[seen, head // group].astype(np.float64)
            values = sequence.value[seen, head // group].astype(np.float64)
            scores = keys @ sequence.query[position, head].astype(np.float64) * scale
            if extras.softcap is not None:
                scores = extras.softcap * np.tanh(scores / extras.softcap)
            sinks = [] if extras.sinks is None else [extras.sinks[head]]
            weights = np.exp(np.concatenate([scores, sinks]) - max([*scores, *sinks]))
            out[i, head] = weights[: len(seen)] @ values / weights.sum()
    return out


def lay_out(
    rng: np.random.Generator,
    geometry: Geometry,
    sequences: list[Sequence],
    rows: list[Row],
    shape: Shape,
    fill: float = np.nan,
    extras: Extras = PLAIN,
) -> Step:
    """Puts each row's committed keys into blocks of its own at random places of the pool, and packs its new tokens.

    Everything that no row may read holds `fill`: free blocks, slots behind the committed ones, slots before the window
    of the row's first query, padding tokens. Table entries behind the committed ones are holes or blocks of others.
    With a ring all entries are noise, and the ring of a row's place holds its newest keys.
    """
    size, kv_heads, head_dim = geometry.block_size, geometry.num_kv_heads, geometry.head_dim
    slots = np.full((shape.num_blocks, size, 2, kv_heads, head_dim), fill, geometry.dtype)
    staged = np.full((shape.tokens, 2, kv_heads, head_dim), fill, geometry.dtype)
    query = np.full((shape.tokens, geometry.num_heads, head_dim), fill, geometry.dtype)
    noise = (*HOLES, shape.num_blocks, 0, shape.num_blocks - 1)
    table = rng.choice(noise, (shape.rows, shape.columns)).astype(np.int32)
    places = rng.permutation(shape.rows)[: len(rows)].astype(np.int32)
    # Block 0 and the last one stay out of every table: clamped and negative ids would land there.
    free = list(1 + rng.permutation(shape.num_blocks - 2))
    spans, start = [], 0
    for sequence, row, place in zip(sequences, rows, places, strict=True):
        kv = np.stack([sequence.key, sequence.value], axis=1)
        behind = 0 if extras.window is None else max(0, row.past - extras.window + 1)
        kv[:behind] = fill
        if extras.ring is not None:
            held = np.arange(max(0, row.past - extras.ring * size), row.past)
            slots[place * extras.ring + held // size % extras.ring, held % size] = kv[held]
        else:
            for column, first in enumerate(range(0, row.past, size)):
                block = free.pop()
                table[place, column] = block
                stop = min(first + size, row.past)
                slots[block, : stop - first] = kv[first:stop]
        span = slice(start, start + row.count)
        staged[span], query[span] = kv[row.past :][: row.count], sequence.query[row.past :][: row.count]
        spans.append(span)
        start = span.stop
    tiles = make_query_tiles(
        places,
        np.array([row.past for row in rows], np.int64),
        np.array([row.count for row in rows], np.int64),
        tile_size=shape.tile_size,
        key_tile=KEY_TILE,
        padded_tiles=shape.tiles,
        padded_tokens=shape.tokens,
    )
    return Step(query, staged, to_pages(slots), table, tiles, shape, geometry.scale, tuple(spans), extras)


def lay_out_codes(
    seed: int,
    geometry: Geometry,
    code: str,
    sequences: list[Sequence],
    rows: list[Row],
    shape: Shape,
    extras: Extras = PLAIN,
    dead: float = np.nan,
) -> tuple[Step, list[Sequence]]:
    """Lays the sequences out as codes and scales, and returns what these stand for, in float64.

    What no row may read has scales of `dead`, and codes of NaN if there are such.
    """
    fill = dead if np.dtype(code).kind != "i" else -128

    def lay(layout: Geometry, parts: list[Sequence], empty: float) -> Step:
        # The same seed thrice gives the same table.
        return lay_out(np.random.default_rng(seed), layout, parts, rows, shape, empty, extras)

    codes, scales, meant = [], [], []
    for one in sequences:
        kv = [quantise(part, np.dtype(code)) for part in (one.key, one.value)]
        codes.append(Sequence(one.query, *(np.asarray(part) for part, _ in kv)))
        scales.append(Sequence(one.query[..., :1], *(np.asarray(scale)[..., None] for _, scale in kv)))
        products = [
            np.asarray(part).astype(np.float64) * np.asarray(scale, np.float64)[..., None]
            for part, scale in kv
        ]
        meant.append(Sequence(one.query, *products))
    step = lay(geometry, sequences, dead)
    held = lay(dataclasses.replace(geometry, dtype=code), codes, fill)
    factors = lay(dataclasses.replace(geometry, dtype="float32", head_dim=1), scales, dead)
    return dataclasses.replace(
        step,
        staged=held.staged,
        pages=held.pages,
        scales=(factors.staged[..., 0], factors.pages[..., 0]),
    ), meant


# Ring and window are data here, so that their many values share a program.
@functools.partial(jax.jit, static_argnames=("tile_size", "scale", "softcap"))
def _attention(query, staged, pages, block_table, tiles, **options):
    return paged_attention(query, staged, pages, block_table, tiles, **options)


def attend(step: Step) -> list[np.ndarray]:
    """Each row's output, dtype[count, num_heads, head_dim]."""
    sinks = step.extras.sinks
    out = _attention(
        step.query,
        step.staged,
        step.pages,
        step.block_table,
        step.tiles,
        sinks=None if sinks is None else np.array(sinks, np.float32),
        window=step.extras.window,
        ring=step.extras.ring,
        scales=step.scales,
        tile_size=step.shape.tile_size,
        scale=step.scale,
        softcap=step.extras.softcap,
    )
    out = np.array(out, copy=True)
    return [out[span] for span in step.spans]
