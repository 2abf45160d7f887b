"""Mixture of experts, token by token: routing, and products with each token's own experts only.

(token, expert) pairs are sorted by expert and multiplied in tiles of a few rows of one expert. So no more weights are
read than those of the experts in use, and since a product keeps a row's bits whatever rows are beside it, a token's
result doesn't depend on the other tokens.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from onnx_import.ops.norm import sum_last
from onnx_import.ops.quantized import QuantisedWeight, integer_matmul, quantise_rows

_WIDTH = 64
"""Columns of a block, as in `matmul`."""
_SMALL_TILE = 8
_LARGE_TILE = 32
"""Rows of a tile: a decode step's few pairs would leave most of a large one empty, while a prefill would read weights
four times as often with small ones."""
_FEW_PAIRS = 256
_MIXER_JITTER = 0.01

Expert = Callable[[jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class DenseExperts:
    """Weights [experts, out, in] as blocks float [experts, out / 64, in, 64], `out` padded with zeros."""

    blocks: Any
    out: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class QuantisedExperts:
    """codes int8 [experts, out, in] times scale float32 [experts, out] approximates the weights."""

    codes: Any
    scale: Any


def dense_experts_struct(shape: tuple[int, ...], dtype: np.dtype) -> DenseExperts:
    """Shapes of the DenseExperts of weights [experts, out, in]."""
    experts, rows, columns = shape
    return DenseExperts(jax.ShapeDtypeStruct((experts, -(-rows // _WIDTH), columns, _WIDTH), dtype), rows)


def dense_experts(weights: np.ndarray) -> DenseExperts:
    """Lay weights [experts, out, in] out as column blocks."""
    experts, rows, columns = weights.shape
    blocks = -(-rows // _WIDTH)
    padded = np.zeros((experts, blocks * _WIDTH, columns), weights.dtype)
    padded[:, :rows] = weights
    split = padded.reshape(experts, blocks, _WIDTH, columns)
    return DenseExperts(np.ascontiguousarray(split.transpose(0, 1, 3, 2)), rows)


def quantised_experts_struct(shape: tuple[int, ...]) -> QuantisedExperts:
    """Shapes of the QuantisedExperts of weights [experts, out, in]."""
    return QuantisedExperts(
        jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    )


def quantised_experts(weights: np.ndarray) -> QuantisedExperts:
    """Round weights [experts, out, in] to int8 with one scale an output row."""
    rows = quantise_rows(weights.reshape(-1, weights.shape[-1]).astype(np.float32, copy=False))
    return QuantisedExperts(rows.codes.reshape(weights.shape), rows.scale.reshape(weights.shape[:-1]))


def expert_matmul(
    x: jax.Array, weights: DenseExperts | QuantisedExperts, bias: jax.Array | None, expert: jax.Array
) -> jax.Array:
    """x [rows, in] times the weight [out, in] of one expert, plus its row of bias [experts, out]: float32 [rows, out].

    `rows` is at least 2.
    """
    if isinstance(weights, QuantisedExperts):
        product = integer_matmul(x, QuantisedWeight(weights.codes[expert], weights.scale[expert]))
    else:
        product = _blocks_matmul(x, weights, expert)
    return product if bias is None else product + bias[expert].astype(jnp.float32)


def _blocks_matmul(x: jax.Array, weights: DenseExperts, expert: jax.Array) -> jax.Array:
    _, blocks, columns, width = weights.blocks.shape

    def multiply(nth: jax.Array, done: jax.Array) -> jax.Array:
        # One block at a time is copied out of the experts, not a whole weight.
        block = jax.lax.dynamic_slice(weights.blocks, (expert, nth, 0, 0), (1, 1, columns, width))[0, 0]
        part = jax.lax.dot_general(x, block, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice(done, part, (0, nth * width))

    empty = jnp.empty((x.shape[0], blocks * width), jnp.float32)
    return jax.lax.fori_loop(0, blocks, multiply, empty)[:, : weights.out]


def route(logits: jax.Array, k: int, *, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The k experts of each token with the largest logits [tokens, experts], equal ones in order of their number.

    Returns weights float32 [tokens, k], the softmax over all experts, divided by their sum if `normalise`, and
    experts int32 [tokens, k].
    """
    logits = logits.astype(jnp.float32)
    powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    experts = jax.lax.top_k(logits, k)[1]
    return mixing_weights(powers / sum_last(powers), experts, normalise=normalise), experts


def mixing_weights(values: jax.Array, experts: jax.Array, *, normalise: bool) -> jax.Array:
    """values [tokens, experts] at the chosen experts [tokens, k], divided by their sum if `normalise`: float32."""
    weights = jnp.take_along_axis(values.astype(jnp.float32), experts, axis=-1)
    return weights / _in_order(weights, 1)[:, None] if normalise else weights


def sparse_mixer(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two experts a token from logits [tokens, experts]: weights float32 [tokens, 2], experts int32 [tokens, 2].

    SparseMixer of Phi-3.5-MoE without its noise: each choice is the largest logit left, weighted by a softmax over
    those that fall below it by no more than 2 % of the larger of their own size and it.
    """
    left = logits = logits.astype(jnp.float32)
    weights, experts = [], []
    for _ in range(2):
        best = jnp.argmax(left, axis=-1, keepdims=True)
        peak = jnp.take_along_axis(left, best, axis=-1)
        near = peak - left <= 2 * _MIXER_JITTER * jnp.maximum(jnp.abs(logits), peak)
        weights.append(1 / sum_last(jnp.where(near, jnp.exp(left - peak), 0.0)))
        experts.append(best)
        left = jnp.where(jnp.arange(left.shape[-1]) == best, -jnp.inf, left)
    return jnp.concatenate(weights, -1), jnp.concatenate(experts, -1).astype(jnp.int32)


def mix(x: jax.Array, weights: jax.Array, experts: jax.Array, count: int, expert: Expert) -> jax.Array:
    """Sum over each token's experts of weight times expert(x): in x's dtype and shape [tokens, width].

    `weights` float32 and `experts` int32 are [tokens, k], the numbers below `count`. `expert` maps rows [tile, width]
    and the number of an expert to float32 [tile, width]; it has to treat rows alike and apart.
    """
    tokens, k = experts.shape
    pairs = tokens * k
    tile = _SMALL_TILE if pairs <= _FEW_PAIRS else _LARGE_TILE
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=count)
    tiles = -(-sizes // tile)
    ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(tiles)
    rows = jnp.pad(x[order // k], ((0, tile), (0, 0)))

    def run(nth: jax.Array, done: jax.Array) -> jax.Array:
        number = jnp.searchsorted(tile_ends, nth, side="right")
        within = nth - (tile_ends[number] - tiles[number])
        first = ends[number] - sizes[number] + within * tile
        result = expert(jax.lax.dynamic_slice_in_dim(rows, first, tile), number)
        # An expert's last tile runs on into the next one's rows, which that one's tiles overwrite later.
        return jax.lax.dynamic_update_slice(done, result, (first, 0))

    empty = jnp.zeros((pairs + tile, x.shape[1]), jnp.float32)
    done = jax.lax.fori_loop(0, tile_ends[-1], run, empty)
    results = done[jnp.argsort(order)].reshape(tokens, k, -1)
    return _in_order(results * weights[:, :, None], 1).astype(x.dtype)


def _in_order(values: jax.Array, axis: int) -> jax.Array:
    """Sum over a short axis from first to last, whatever the other sizes are."""
    parts = jnp.moveaxis(values, axis, 0)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
