"""A decoder whose next token can be worked out by hand, so that the engine is tested with no weights.

One layer, one head. A token t at position p has the attention weight `2 ** ((t + p) % 3)` by its key and the number
`1 + (5 * t + 3 * p) % 31` by its value; the next token is the weighted sum of the numbers of all that a query sees,
modulo `LETTERS`. So one key or value that is missing, foreign, stale or at a wrong position changes the token:
`next_token` is the same in plain Python. Logits fall by `SLOPE` a step of the circle from that token on, so every
distribution is known too, and ids from `LETTERS` on have logit -inf in every row.

Three inputs make trouble: logits are NaN after the token `NAN`, all -inf after `ALL_MASKED`, and NaN everywhere
under `with_params(model, poison=True)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.model import Model
from jaxengine.programs import Programs
from onnx_import import Attention, AttentionSpec, FolderConfig

LETTERS, VOCAB = 28, 32
NAN, ALL_MASKED = 28, 29
SLOPE = 0.25
CONTEXT = 64


@dataclasses.dataclass(frozen=True, eq=False)
class ToyDecoder:
    """See the head of this file; a `jaxengine.programs.Decoder`."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int
    params: dict[str, Any]
    identity: str

    def apply(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        logits_rows: jax.Array,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Logits float32[R, VOCAB] and what attention staged."""
        rank = ((tokens + positions) % 3).astype(jnp.float32)
        number = (1 + (5 * tokens + 3 * positions) % 31).astype(jnp.float32)
        query = jnp.broadcast_to(jnp.array([1.0, 0.0], jnp.float32), (*tokens.shape, 2))
        key = jnp.stack([rank * np.float32(math.log(2)), jnp.zeros_like(rank)], axis=-1)
        # Attention divides by the sum of the weights; a mean of their inverses, times the count, gives that sum.
        value = jnp.stack([number, jnp.exp2(-rank)], axis=-1)
        seen, staged = attention(self.layers[0], query[:, None], key[:, None], value[:, None])
        seen, last = seen[logits_rows, 0], tokens[logits_rows]
        count = (positions[logits_rows] + 1).astype(jnp.float32)
        chosen = jnp.round(seen[:, 0] / seen[:, 1] * count).astype(jnp.int32) % LETTERS
        ids = jnp.arange(VOCAB)
        behind = ((ids - chosen[:, None]) % LETTERS).astype(jnp.float32)
        logits = jnp.where(ids < LETTERS, -np.float32(SLOPE) * behind, -jnp.inf)
        logits = jnp.where((last == ALL_MASKED)[:, None], -jnp.inf, logits)
        logits = jnp.where((last == NAN)[:, None], jnp.nan, logits)
        return logits + params["poison"], (staged,)


def next_token(prefix: Sequence[int]) -> int:
    """The arg-max after `prefix`."""
    return sum(2 ** ((t + p) % 3) * (1 + (5 * t + 3 * p) % 31) for p, t in enumerate(prefix)) % LETTERS


def continuation(prefix: Sequence[int], count: int) -> list[int]:
    """The `count` greedy tokens after `prefix`, end-of-sequence ids not looked at."""
    sequence = list(prefix)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prefix) :]


def logits_after(prefix: Sequence[int]) -> np.ndarray:
    """The logits after `prefix`, float64[VOCAB]."""
    ids = np.arange(VOCAB)
    return np.where(ids < LETTERS, -SLOPE * ((ids - next_token(prefix)) % LETTERS), -np.inf)


@functools.cache
def _decoder() -> tuple[ToyDecoder, Programs]:
    spec = AttentionSpec(
        layer=0, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, kv_dtype=np.dtype(np.float32)
    )
    decoder = ToyDecoder((spec,), VOCAB, {"poison": jnp.zeros((), jnp.float32)}, "toy")
    return decoder, Programs(decoder)


def toy_model(
    *,
    eos: Sequence[int] = (),
    context_length: int = CONTEXT,
    max_length: int | None = None,
    search: Mapping[str, Any] | None = None,
) -> Model:
    """A model around the toy decoder; all of them share one set of compiled programs."""
    decoder, programs = _decoder()
    config = FolderConfig(
        model_type="toy",
        vocab_size=VOCAB,
        context_length=context_length,
        max_length=context_length if max_length is None else max_length,
        eos_token_ids=tuple(eos),
        bos_token_id=None,
        pad_token_id=None,
        search={} if search is None else search,
        notes=(),
    )
    return Model(decoder=decoder, config=config, path=Path("toy"), programs=programs)


def with_params(model: Model, *, poison: bool) -> Model:
    """The same model and compiled programs with logits that are NaN, or not."""
    params = {"poison": jnp.full((), jnp.nan if poison else 0.0, jnp.float32)}
    return dataclasses.replace(model, decoder=dataclasses.replace(_decoder()[0], params=params))
