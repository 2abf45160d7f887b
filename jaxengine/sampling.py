"""Choosing a token for each row: arg-max, or temperature, then top-k, then top-p over what is left.

Rows run one after the other through one small program, so a row's choice cannot depend on its company, and a greedy row
pays for an arg-max only. A row's random stream is folded from its seed, its position and the purpose of the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SAMPLE_PURPOSE = 0
"""Folded into the key of the draw that chooses a token, to keep it apart from other draws at the same position."""


class SamplingRows(NamedTuple):
    """Settings of each row.

    Attributes:
        temperature: float32[rows], 0 for arg-max.
        top_k: int32[rows], 0 for off.
        top_p: float32[rows], 1 for off.
        seed: uint32[rows].
        position: int32[rows], the sequence position that the token will take.
    """

    temperature: np.ndarray | jax.Array
    top_k: np.ndarray | jax.Array
    top_p: np.ndarray | jax.Array
    seed: np.ndarray | jax.Array
    position: np.ndarray | jax.Array


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Chooses one token a row.

    Args:
        logits: float32[rows, vocab].
        rows: The rows' settings.

    Returns:
        int32[rows]; ties of an arg-max go to the lowest id.
    """
    best = _arg_max(logits)

    def choose(row: tuple[jax.Array, jax.Array, SamplingRows]) -> jax.Array:
        row_logits, row_best, settings = row
        return jax.lax.cond(settings.temperature > 0, lambda: _draw(row_logits, settings), lambda: row_best)

    sampling = (rows.temperature > 0).any()
    return jax.lax.cond(sampling, lambda: jax.lax.map(choose, (logits, best, rows)), lambda: best)


def _arg_max(logits: jax.Array) -> jax.Array:
    """int32[rows]; as `jnp.argmax`, but XLA on CPU runs a maximum and a minimum several times faster than its pair."""
    vocab = logits.shape[-1]
    ids = jnp.where(
        logits == logits.max(axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1
    )
    return ids.min(axis=-1)


def _draw(logits: jax.Array, row: SamplingRows) -> jax.Array:
    vocab = logits.shape[0]
    order = jnp.argsort(-logits, stable=True)
    scaled = (logits[order] - logits[order[0]]) / row.temperature
    rank = jnp.arange(vocab)
    kept = rank < jnp.where(row.top_k == 0, vocab, row.top_k)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    before = jnp.cumsum(weights) - weights
    kept &= (before < row.top_p * weights.sum()) | (row.top_p >= 1.0)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(row.seed), row.position), SAMPLE_PURPOSE)
    noisy = jnp.where(kept | (rank == 0), scaled + jax.random.gumbel(key, (vocab,)), -jnp.inf)
    return order[jnp.argmax(noisy)].astype(jnp.int32)
