"""The compiled programs of a step, and the few shapes that they are compiled for.

`forward` only reads the pages and returns this step's keys and values as staged arrays; `choose` makes tokens of its
logits, while the host may have prepared masks meanwhile; `publish` scatters what is accepted into the pages it takes
over. Forward and publish are kept apart, because a program that reads and writes a pool may copy it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import onnx_import
from jaxengine.config import EngineConfig
from jaxengine.fixed_state import BANKS, RowStates, StateRows, after_prefix
from jaxengine.kernels import DECODE_TILE, PREFILL_TILE, Kernels, plain
from jaxengine.planning import StepPlan
from jaxengine.sampling import choose
from jaxengine.state import Control
from jaxengine.windows import as_blocks, ring_of
from pallas_kernels import (
    KEY_TILE,
    Backend,
    QueryTiles,
    make_query_tiles,
    max_query_tiles,
    paged_attention,
    publish_kv,
)

SMALLEST_MIXED_BUCKET = 16


class Decoder(Protocol):
    """What the engine needs of a decoder; `onnx_import.Decoder` is one, and says what `apply` gets and gives."""

    @property
    def layers(self) -> tuple[onnx_import.AttentionSpec, ...]:
        """The attention layers, in layer order."""
        ...

    @property
    def fixed(self) -> tuple[onnx_import.FixedSpec, ...]:
        """The states of fixed size that every request owns."""
        ...

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        ...

    @property
    def params(self) -> dict[str, Any]:
        """A pytree of weights."""
        ...

    @property
    def identity(self) -> str:
        """A short text that differs between any two models."""
        ...

    def apply(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        attention: onnx_import.Attention,
        logits_rows: jax.Array,
        fixed: onnx_import.FixedState | None,
        limits: jax.Array,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns float32 logits[rows, vocab] and what the callables handed back; traced under jit.

        That is an entry a layer, then one a fixed state.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a compiled step.

    Attributes:
        tokens: Packed tokens, padding included.
        rows: Rows, padding included.
        logits: Rows of logits, padding included.
        tile_size: Queries an attention tile.
        tiles: Attention tiles, padding included.
    """

    tokens: int
    rows: int
    logits: int
    tile_size: int
    tiles: int


class StepBatch(NamedTuple):
    """A packed step; padding tokens are id 0 at position 0 of no row.

    Attributes:
        tokens: int32[tokens].
        positions: int32[tokens], absolute.
        limits: int32[tokens], the limit of each token's session.
        logits_rows: int32[logits], the packed token behind which each is.
        tiles: The attention tiles.
        states: How rows meet their fixed states.
    """

    tokens: np.ndarray
    positions: np.ndarray
    limits: np.ndarray
    logits_rows: np.ndarray
    tiles: QueryTiles
    states: StateRows


class Destinations(NamedTuple):
    """Where each packed token's keys and values go; padding tokens point outside and are dropped.

    Attributes:
        place: int32[tokens], row of the block table.
        column: int32[tokens], its column; modulo the length of a ring the block there.
        block: int32[tokens], the block of the pool.
        slot: int32[tokens], slot of the block.
        states: int32[rows], where each row's fixed states go; outside for padding.
    """

    place: np.ndarray
    column: np.ndarray
    block: np.ndarray
    slot: np.ndarray
    states: np.ndarray


class ForwardResult(NamedTuple):
    """What a forward pass made.

    Attributes:
        staged: A layer each, dtype[tokens, 2, num_kv_heads, head_dim].
        fixed: A fixed state each, dtype[rows, *shape]; with a `Replay` each where that was asked for.
        logits: float32[logits, vocab].
    """

    staged: tuple[jax.Array, ...]
    fixed: tuple[Any, ...]
    logits: jax.Array


def bucket_for(plan: StepPlan, config: EngineConfig, prefill_tile: int = PREFILL_TILE) -> Bucket:
    """Returns the smallest compiled shape that holds a plan: by rows for pure decodes, else by tokens.

    Attention tiles of the latter have `prefill_tile` queries, see `Kernels`.
    """
    rows = power_of_two(max(config.max_batch_size, 2))
    if not (plan.is_prefill.any() or plan.num_drafts.any()):
        size = power_of_two(max(len(plan.request_ids), 2))
        # Products need two rows to keep their bits; attention does not, and one request alone needs one tile.
        return Bucket(size, size, size, DECODE_TILE, size if len(plan.index) > 1 else 1)
    total = plan.total_tokens
    size = max(power_of_two(total), SMALLEST_MIXED_BUCKET)
    logits = max(rows, power_of_two(int(plan.num_logits.sum())))
    return Bucket(
        size, rows, logits, prefill_tile, max_query_tiles(size, config.max_batch_size, prefill_tile)
    )


def pack(control: Control, plan: StepPlan, bucket: Bucket) -> StepBatch:
    """Lays a plan's tokens out one row behind the other, padded to the bucket."""
    token_row = np.repeat(np.arange(len(plan.index)), plan.num_tokens)
    local = np.arange(plan.total_tokens) - plan.offsets[token_row]
    tokens = np.zeros(plan.total_tokens, np.int32)
    decode = ~plan.is_prefill
    tokens[plan.offsets[decode]] = control.tokens.last(plan.index[decode])
    for i in np.flatnonzero(plan.is_prefill):
        start, count = int(plan.past[i]), int(plan.num_tokens[i])
        tokens[plan.offsets[i] : plan.offsets[i] + count] = control.tokens.read(
            int(plan.index[i]), start, start + count
        )
    for i in np.flatnonzero(plan.num_drafts):
        end = plan.offsets[i] + plan.num_tokens[i]
        drafts = control.requests.carried[plan.index[i]].drafts[: plan.num_drafts[i]]
        tokens[end - plan.num_drafts[i] : end] = drafts
    requests = control.requests
    return StepBatch(
        tokens=padded(tokens, bucket.tokens),
        positions=padded((plan.past[token_row] + local).astype(np.int32), bucket.tokens),
        limits=padded(requests.max_session[plan.index][token_row].astype(np.int32), bucket.tokens),
        logits_rows=padded(plan.logits_index.astype(np.int32), bucket.logits),
        tiles=make_query_tiles(
            plan.places,
            plan.past,
            plan.num_tokens,
            tile_size=bucket.tile_size,
            key_tile=KEY_TILE,
            padded_tiles=bucket.tiles,
            padded_tokens=bucket.tokens,
        ),
        states=StateRows(
            start=padded(plan.offsets.astype(np.int32), bucket.rows),
            num_tokens=padded(plan.num_tokens.astype(np.int32), bucket.rows),
            source=padded(_state_slots(control, plan, requests.bank[plan.index]), bucket.rows),
            owned=padded(plan.past > 0, bucket.rows),
            row_of=padded(token_row.astype(np.int32), bucket.tokens),
        ),
    )


def _state_slots(control: Control, plan: StepPlan, bank: np.ndarray) -> np.ndarray:
    return plan.places + bank.astype(np.int32) * control.config.max_batch_size


def destinations(control: Control, plan: StepPlan, bucket: Bucket) -> Destinations:
    """Returns where the plan's tokens are to be kept, by the proposed tables: committed blocks, then reserved ones."""
    size = control.config.block_size
    outside = control.num_blocks
    place = np.full(bucket.tokens, control.config.max_batch_size, np.int32)
    column, slot = np.zeros((2, bucket.tokens), np.int32)
    block = np.full(bucket.tokens, outside, np.int32)
    token_row = np.repeat(np.arange(len(plan.index)), plan.num_tokens)
    position = plan.past[token_row] + np.arange(plan.total_tokens) - plan.offsets[token_row]
    used = slice(0, plan.total_tokens)
    place[used], column[used], slot[used] = plan.places[token_row], position // size, position % size

    held = control.blocks_held[plan.index]
    first_reserved = np.cumsum(plan.num_reserved) - plan.num_reserved
    from_reserve = column[used] - held[token_row]
    fresh = from_reserve >= 0
    block[used][fresh] = plan.reserved[(first_reserved[token_row] + from_reserve)[fresh]]
    # Nearly every row of a large batch: one token into the last block of its table.
    last = (plan.num_tokens == 1) & (plan.num_reserved == 0) & (plan.past // size == held - 1)
    block[plan.offsets[last]] = control.blocks.last(plan.index[last])
    for i in np.flatnonzero((plan.past < held * size) & ~last):
        start, stop = plan.offsets[i], plan.offsets[i] + plan.num_tokens[i]
        columns = column[start:stop]
        known = control.blocks.read(
            int(plan.index[i]), int(columns[0]), min(int(columns[-1]) + 1, int(held[i]))
        )
        inside = columns < held[i]
        block[start:stop][inside] = known[columns[inside] - columns[0]]
    states = np.full(bucket.rows, BANKS * control.config.max_batch_size, np.int32)
    states[: len(plan.index)] = _state_slots(control, plan, 1 - control.requests.bank[plan.index])
    return Destinations(place, column, block, slot, states)


class Programs:
    """The compiled programs of one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        """Wraps the programs of `decoder`; each is compiled at its first use of a shape."""
        self.forward = jax.jit(
            functools.partial(_forward, decoder), static_argnames=("tile_size", "kernels", "replayable")
        )
        self.choose = jax.jit(choose, static_argnames=("known_ids", "top"))
        self.after_prefixes = jax.jit(_after_prefixes)
        self.publish = jax.jit(_publish, donate_argnums=(0, 1, 2), static_argnames="backend")
        self.publish_copy = jax.jit(_publish, static_argnames="backend")


def _forward(
    decoder: Decoder,
    params: dict[str, jax.Array],
    pages: tuple[jax.Array, ...],
    block_table: jax.Array,
    fixed: tuple[jax.Array, ...],
    batch: StepBatch,
    *,
    tile_size: int,
    kernels: Kernels | None = None,
    replayable: bool = False,
) -> ForwardResult:
    pages_of = {spec.layer: layer_pages for spec, layer_pages in zip(decoder.layers, pages, strict=True)}
    kernels = plain(decoder.layers) if kernels is None else kernels
    backend_of = {
        spec.layer: backend for spec, backend in zip(decoder.layers, kernels.attention, strict=True)
    }

    def attention(
        spec: onnx_import.AttentionSpec,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        staged = jnp.stack([key, value], axis=1).astype(spec.kv_dtype)
        held = pages_of[spec.layer]
        output = paged_attention(
            query,
            staged,
            as_blocks(held),
            block_table,
            batch.tiles,
            tile_size=tile_size,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
            ring=ring_of(held),
            backend=backend_of[spec.layer],
            batch_invariant=kernels.batch_invariant,
        )
        return output, staged

    pools = {spec.name: pool for spec, pool in zip(decoder.fixed, fixed, strict=True)}
    states = RowStates(pools, batch.states, replayable=replayable)
    logits, staged = decoder.apply(
        params,
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.positions),
        attention,
        jnp.asarray(batch.logits_rows),
        states,
        jnp.asarray(batch.limits),
    )
    layers = len(decoder.layers)
    return ForwardResult(staged[:layers], staged[layers:], logits)


def _after_prefixes(fixed: tuple[Any, ...], rows: StateRows, accepted: jax.Array) -> tuple[jax.Array, ...]:
    """Each fixed state after the first `accepted` int32[rows] tokens of each row, of a forward pass with replays."""
    return tuple(after_prefix(rows, replay, accepted) for _, replay in fixed)


def _write(pages: jax.Array, staged: jax.Array, to: Destinations) -> jax.Array:
    ring = ring_of(pages)
    if ring is None:
        (after,) = publish_kv([pages], [staged], jnp.asarray(to.block), jnp.asarray(to.slot), backend="xla")
        return after
    # Rings as one row of blocks and back would be copied where a layer has one KV head.
    return pages.at[to.place, to.column % ring, :, :, to.slot].set(staged, mode="drop")


def _write_by_kernel(
    pages: tuple[jax.Array, ...],
    staged: tuple[jax.Array, ...],
    to: Destinations,
    places: int,
    backend: Backend,
) -> tuple[jax.Array, ...]:
    # Layers of the same rings share an array, which the kernel then reads once.
    @functools.cache
    def blocks(ring: int | None) -> jax.Array:
        if ring is None:
            return jnp.asarray(to.block)
        # The place of what isn't kept can be any outside, which the product would bring back inside.
        return jnp.where(to.place < places, to.place * ring + to.column % ring, places * ring)

    after = publish_kv(
        [as_blocks(held) for held in pages],
        staged,
        [blocks(ring_of(held)) for held in pages],
        jnp.asarray(to.slot),
        backend=backend,
    )
    return tuple(written.reshape(held.shape) for written, held in zip(after, pages, strict=True))


def _publish(
    pages: tuple[jax.Array, ...],
    block_table: jax.Array,
    fixed: tuple[jax.Array, ...],
    staged: tuple[jax.Array, ...],
    states: tuple[jax.Array, ...],
    to: Destinations,
    *,
    backend: Backend = "xla",
) -> tuple[tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...]]:
    if backend == "xla":
        pages = tuple(_write(held, fresh, to) for held, fresh in zip(pages, staged, strict=True))
    else:
        pages = _write_by_kernel(pages, staged, to, block_table.shape[0], backend)
    block_table = block_table.at[to.place, to.column].set(to.block, mode="drop")
    fixed = tuple(
        pool.at[to.states].set(after, mode="drop") for pool, after in zip(fixed, states, strict=True)
    )
    return pages, block_table, fixed


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """Returns `values` with zeros behind them along the first axis, `size` in all."""
    out = np.zeros((size, *values.shape[1:]), values.dtype)
    out[: len(values)] = values
    return out


def power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()
