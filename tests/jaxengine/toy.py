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

import jaxengine as je
from jaxengine.programs import Programs
from jaxengine.requests import has_pending_work
from jaxengine.state import row_of
from onnx_import import AttentionSpec, FolderConfig

LETTERS, VOCAB = 28, 32
NAN, ALL_MASKED = 28, 29
SLOPE = 0.25
CONTEXT = 64

SMALL = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=16, block_size=4)
"""The shape most tests share, so that it is compiled once."""


@dataclasses.dataclass(frozen=True, eq=False)
class ToyDecoder:
    """See the head of this file; satisfies the protocol of `onnx_import.Decoder`."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int
    params: dict[str, Any]
    identity: str

    def apply(self, params, tokens, positions, attention, logits_rows):
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
) -> je.Model:
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
    return je.Model(decoder=decoder, config=config, path=Path("toy"), programs=programs)


def with_params(model: je.Model, *, poison: bool) -> je.Model:
    """The same model and compiled programs with logits that are NaN, or not."""
    params = {"poison": jnp.full((), jnp.nan if poison else 0.0, jnp.float32)}
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, params=params))


def leaves(state: je.EngineState) -> list[Any]:
    """Every leaf and every piece of metadata of a state, copied, for comparing states exactly."""
    control = state.control
    arrays = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(state)]
    return [*arrays, control.events, control.config, control.facts]


def assert_same(before: list[Any], after: list[Any]) -> None:
    """Fails unless two results of `leaves` are equal, dtypes included."""
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        else:
            assert one == other


def begun(
    model: je.Model, *prompts: Sequence[int], limit: int = 0, config: je.EngineConfig = SMALL
) -> je.EngineState:
    """A state whose requests 1, 2, … have each begun a turn with one of `prompts`."""
    state = je.init_state(model, config)
    for prompt in prompts:
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(limit))
    return state


def finish(model: je.Model, state: je.EngineState) -> tuple[je.EngineState, list[je.EventRecord]]:
    """Steps until nothing is left to run, checking the invariants; returns the state and all events, drained."""
    state, events = je.drain(state, len(state.control.events))
    drained = list(events)
    while has_pending_work(state):
        before = state
        state, events = je.step(model, state)
        assert state is not before, "every request waits for capacity"
        je.check_invariants(state)
        state, events = je.drain(state, len(events))
        drained += events
    return state, drained


def tokens_of(state: je.EngineState, request_id: int) -> list[int]:
    """A request's sequence."""
    row = row_of(state.control, request_id)
    return state.control.tokens.read(row, 0, int(state.control.requests.length[row])).tolist()


def column(state: je.EngineState, request_id: int, name: str) -> int:
    """A request's entry in a control column."""
    return int(getattr(state.control.requests, name)[row_of(state.control, request_id)])
