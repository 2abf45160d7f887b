"""Attention steps to measure, tune or compile for: known models' heads, what a step reads and computes, arguments.

A case is plain data, and `Inputs` of it can be made on a device or, by `jax.eval_shape`, as shapes alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_arrays import random_blocks, random_key
from pallas_kernels import KEY_TILE, QueryTiles, make_query_tiles


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention of a layer.

    Attributes:
        name: What tables call it.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Numbers of a head.
        window: Keys that a query sees, itself included; None for all.
        sinks: Whether each head has a logit without a value.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: bool = False


# From the models' public configurations. Qwen3 8B has the heads of Llama-3 8B.
MODELS = {
    heads.name: heads
    for heads in (
        Heads("llama-3-8b", 32, 8, 128),
        Heads("gpt-oss", 64, 8, 64, sinks=True),
        Heads("gpt-oss-window", 64, 8, 64, window=128, sinks=True),
        Heads("qwen3-30b-a3b", 32, 4, 128),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `batch` equal rows, each of `new` tokens behind `past` committed ones; one new token is decode."""

    heads: Heads
    batch: int
    new: int
    past: int
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def context(self) -> int:
        """Tokens of a row, the new ones included."""
        return self.past + self.new

    @property
    def columns(self) -> int:
        """Blocks of a row."""
        return -(-self.context // self.block_size)

    @property
    def first_key(self) -> int:
        """The oldest position that any query sees."""
        return 0 if self.heads.window is None else max(self.past - self.heads.window + 1, 0)

    @property
    def dead_columns(self) -> int:
        """Blocks of a row that lie behind the window of all queries; the pool doesn't hold them."""
        return self.first_key // self.block_size

    @property
    def bytes_a_key(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.heads.num_kv_heads * self.heads.head_dim * np.dtype(jnp.dtype(self.dtype)).itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the keys and values that the step's queries see, each once; queries and results don't count."""
        return self.batch * (self.context - self.first_key) * self.bytes_a_key

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks that hold the live keys."""
        return self.batch * (self.columns - self.dead_columns) * self.block_size * self.bytes_a_key

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, for pairs of query and key that see each other."""
        seen = np.arange(self.past, self.context) + 1
        if self.heads.window is not None:
            seen = np.minimum(seen, self.heads.window)
        return 4 * self.batch * self.heads.num_heads * self.heads.head_dim * int(seen.sum())

    def __str__(self) -> str:
        if self.new == 1:
            return f"decode {self.batch} x {self.context}"
        return f"prefill {self.batch} x {self.new} behind {self.past}"


class Inputs(NamedTuple):
    """A case's arrays. The pages hold the new tokens too, for forms that publish before they attend.

    Attributes:
        query: dtype[batch * new, num_heads, head_dim].
        pages: dtype[num_blocks, 2, num_kv_heads, block_size, head_dim].
        tables: int32[pools, batch, columns]; each pool's rows have blocks of their own, in random order, and -1
            where a block is dead.
        staged: dtype[pools, batch * new, 2, num_kv_heads, head_dim], the new tokens of each pool.
        sinks: float32[num_heads], or None.
    """

    query: jax.Array
    pages: jax.Array
    tables: jax.Array
    staged: jax.Array
    sinks: jax.Array | None


def make_inputs(case: Case, pools: int) -> Inputs:
    """Normal random arrays; no key of a pool lies in another, so that walking over pools reads memory, not a cache."""
    shape = (pools, case.batch, case.columns - case.dead_columns)
    blocks = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape)
    tables = np.pad(blocks, ((0, 0), (0, 0), (case.dead_columns, 0)), constant_values=-1)
    return _fill(case, blocks.size, jnp.asarray(tables, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(case: Case, num_blocks: int, tables: jax.Array) -> Inputs:
    heads, pools = case.heads, len(tables)
    rng = jax.random.split(random_key(0), 3)
    block_shape = (2, heads.num_kv_heads, case.block_size, heads.head_dim)
    pages = random_blocks(rng[0], (num_blocks, *block_shape), case.dtype)
    position = np.arange(case.past, case.context)
    staged = pages[tables[:, :, position // case.block_size], :, :, position % case.block_size]
    tokens = case.batch * case.new
    return Inputs(
        query=jax.random.normal(rng[1], (tokens, heads.num_heads, heads.head_dim), case.dtype),
        pages=pages,
        tables=tables,
        staged=staged.reshape(pools, tokens, 2, heads.num_kv_heads, heads.head_dim),
        sinks=jax.random.normal(rng[2], (heads.num_heads,), jnp.float32) if heads.sinks else None,
    )


def query_tiles(case: Case, tile_size: int) -> QueryTiles:
    """The tiles of a case's step, none of them padding."""
    tiles = case.batch * -(-case.new // tile_size)
    return make_query_tiles(
        np.arange(case.batch),
        np.full(case.batch, case.past),
        np.full(case.batch, case.new),
        tile_size=tile_size,
        key_tile=KEY_TILE,
        padded_tiles=tiles,
        padded_tokens=case.batch * case.new,
    )
