"""How kernels cut their work, by the compute capability of a card: tables in JSON, checked when they are read.

An entry serves head sizes and packed rows up to its own; the first that fits is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

_FEWEST_TILES = 4
_MOST_FIXED_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; changes no result but by rounding.

    Attributes:
        key_tile: Keys of a step through the pages; a multiple of 64.
        staged_tile: Keys of a step through this step's tokens; a multiple of 16, at most `key_tile`.
        stages: Buffers of the ring, each for a key tile and its values.
        splits: Thread blocks that share a query tile's committed keys.
        split_tiles: Key tiles of each split; None divides each row's tiles among all.
    """

    key_tile: int
    staged_tile: int
    stages: int
    splits: int = 1
    split_tiles: int | None = None


@dataclasses.dataclass(frozen=True)
class AttentionEntry:
    """A line of a table; see `Tuning` for the last three.

    Attributes:
        head_dim: The largest head size that it serves.
        rows: The most packed queries of a tile that it serves.
        key_tile: Keys of a step through the pages.
        staged_tile: Keys of a step through this step's tokens.
        stages: Buffers of the ring.
    """

    head_dim: int
    rows: int
    key_tile: int
    staged_tile: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Table:
    """What is known of one kind of card.

    Attributes:
        multiprocessors: Thread blocks that run at once, one each.
        attention: Entries, smaller ones first.
    """

    multiprocessors: int
    attention: tuple[AttentionEntry, ...]


def parse(text: str) -> Table:
    """Reads a table.

    Raises:
        ValueError: It is no JSON, or lacks or misnames a field, or a number is out of range.
    """
    try:
        value = json.loads(text)
        entries = tuple(AttentionEntry(**entry) for entry in value.pop("attention"))
        table = Table(**value, attention=entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the tuning table can't be read: {error}") from error
    numbers = [table.multiprocessors, *(n for entry in entries for n in dataclasses.astuple(entry))]
    if any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"the tuning table has {numbers}; give whole numbers from 1 on")
    for entry in entries:
        if entry.key_tile % 64 or entry.staged_tile % 16 or entry.staged_tile > entry.key_tile:
            raise ValueError(
                f"{entry} has tiles that products can't take; give a key_tile in steps of 64 and a staged_tile in "
                "steps of 16 that is no larger"
            )
        if entry.stages < 2:
            raise ValueError(f"{entry} has no buffer to fill while one is read; give at least 2 stages")
    return table


@functools.cache
def table() -> Table:
    """The table of Hopper cards, the only ones that the attention kernel runs on."""
    return parse(importlib.resources.files(__name__).joinpath("sm_90.json").read_text())


def most_rows(head_dim: int) -> int:
    """Returns the packed queries that a tile may have; 0 if no entry serves the head size."""
    return max((entry.rows for entry in table().attention if entry.head_dim >= head_dim), default=0)


def attention_tuning(
    head_dim: int, rows: int, work_items: int, most_keys: int, *, batch_invariant: bool
) -> Tuning:
    """Chooses how the attention kernel cuts its work.

    Args:
        head_dim: Size of the heads.
        rows: Packed queries of a tile, at most `most_rows(head_dim)`.
        work_items: Query tiles times KV heads.
        most_keys: A bound on the committed keys that any row sees, from the width of its table or its window.
        batch_invariant: Whether the split may depend on `most_keys` only.
    """
    entry = next(e for e in table().attention if e.head_dim >= head_dim and e.rows >= rows)
    most_tiles = -(-most_keys // entry.key_tile)
    cut = (entry.key_tile, entry.staged_tile, entry.stages)
    if batch_invariant:
        share = max(-(-most_tiles // _MOST_FIXED_SPLITS), 4 * _FEWEST_TILES)
        return Tuning(*cut, splits=max(-(-most_tiles // share), 1), split_tiles=share)
    wanted = -(-2 * table().multiprocessors // work_items)
    return Tuning(*cut, splits=max(min(wanted, most_tiles // _FEWEST_TILES), 1))
