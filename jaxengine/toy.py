"""A decoder whose next token can be worked out by hand, for testing what drives an engine without any weights.

It has one attention layer with one head. The next token is the sum of `weight` times `number` over all tokens that the
last one sees, modulo `LETTERS`; a token's key holds its weight, its value its numbers. After 3 at position 0 and 1 at
position 1, which is the last and so chooses channel 1:

    weight(3, 0) * number(3, 0, 1) = WEIGHTS[4 * 0 % 67 % 6] * NUMBERS[4 * 2 % 67 % 24] = 1 * 10
    weight(1, 1) * number(1, 1, 1) = WEIGHTS[2 * 1 % 67 % 6] * NUMBERS[2 * 3 % 67 % 24] = 5 * 8
    next_token([3, 1]) = (10 + 40) % 28 = 22

A key or value that is missing, foreign, stale, one too many or at a wrong position changes one of the next three tokens
(if several are wrong, but for a chance in 28 ** 3), and `continuation` says in plain Python what they must be. To test
a scheduling policy, run prompts under it, in whatever batches and chunks it makes, and compare:

    engine = jaxengine.Engine(toy_model(), jaxengine.EngineConfig(num_blocks=64))
    request = engine.create_request()
    request.begin_turn([3, 1], jaxengine.TurnOptions(max_generated_tokens=5))
    while engine.has_pending_requests():
        engine.run()
    assert request.tokens.tolist() == [3, 1, *continuation([3, 1], 5)]

`toy_model(hybrid=True)` has two fixed states besides, so that a wrong slot or bank shows as well: a window over the two
tokens before, and a recurrence over all of them. Both add to the sum, modulo `LETTERS`:

    next_token([3, 1], hybrid=True) = (22 + 5 * (3 + 1) + recurrence([3, 1])) % 28
    recurrence([3, 1]) = (3 * (3 * 0 + 3 + 1) + 1 + 1) % 28 = 14

`toy_model(window=W)` has a second attention layer, whose queries see the last W tokens only. It sums up other numbers,
those of the channels that follow, and its sum is added as well:

    number(1, 1, 1 + 3) = NUMBERS[2 * (1 + 1 + 4) % 67 % 24] = 15
    next_token([3, 1], window=1) = (22 + 5 * 15) % 28 = 13

`toy_model(text=True)` has a tokenizer: ids 0 to 25 are the letters a to z, 26 a blank and 27 a full stop; the others
are special tokens, `<28>` for one. So stop strings and grammars can be tried on it as well.

Logits fall by `SLOPE` a step of the circle from the next token on, so every distribution is known (`logits_after`); ids
from `LETTERS` on have logit -inf. Three inputs make trouble: logits are NaN after the token `NAN`, all -inf after
`ALL_MASKED`, and NaN everywhere under `with_params(model, poison=True)`. Sums are exact up to `CONTEXT` tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxengine.model import Model
from jaxengine.programs import Programs
from jaxengine.text import Tokenizer
from onnx_import import Attention, AttentionSpec, FixedSpec, FixedState, FolderConfig

LETTERS, VOCAB = 28, 32
NAN, ALL_MASKED = 28, 29
SLOPE = 0.25
CONTEXT = 64

# Odd weights that differ modulo 7, and numbers that 7 does not divide: modulo 28 = 4 * 7 no product is 0, and two
# products that share a factor differ. So one key more or fewer, or one wrong key or value, always changes the sum, as
# long as the one key of position 0 is seen, which sets its scale.
WEIGHTS = (1, 3, 5, 9, 11, 13)
NUMBERS = tuple(n for n in range(LETTERS) if n % 7)
# Each value holds a number a channel, and queries take turns with the channels: wrong keys whose products happen to
# cancel in one token's sum come to light in the next.
CHANNELS = 3
# What the tokens before count, oldest first; odd and not by 7, as the weights.
WINDOW = (11, 5)
GROWTH = 3
_FIXED = (
    FixedSpec("window", (1, len(WINDOW)), np.dtype(np.float32)),
    FixedSpec("recurrence", (1,), np.dtype(np.float32)),
)
# A prime above any token and position, so that tokens differ at each position, and positions under each token.
PRIME = 67


@dataclasses.dataclass(frozen=True, eq=False)
class ToyDecoder:
    """See the head of this file; a `jaxengine.programs.Decoder`, made by `toy_model`."""

    layers: tuple[AttentionSpec, ...]
    fixed: tuple[FixedSpec, ...]
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
        fixed: FixedState | None = None,
        limits: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns logits float32[rows, VOCAB] and what the callables handed back.

        Tokens and positions are int32[tokens]. Logits are NaN where the key of position 0 is not seen, or in a window
        that of the one position which divides by its length.
        """
        weights = jnp.array(WEIGHTS, jnp.float32)[_mixed(tokens, positions) % len(WEIGHTS)]
        on_first_axis = jnp.zeros(CHANNELS + 1, jnp.float32).at[0].set(1.0)
        query = jnp.broadcast_to(on_first_axis, (len(tokens), CHANNELS + 1))
        key = jnp.log(weights)[:, None] * on_first_axis
        last, channel = tokens[logits_rows], positions[logits_rows] % CHANNELS
        chosen, handed_back = jnp.zeros((len(logits_rows), 1)), []
        for nth, spec in enumerate(self.layers):
            numbers = [
                jnp.array(NUMBERS, jnp.float32)[_mixed(tokens, positions + 1 + held) % len(NUMBERS)]
                for held in range(nth * CHANNELS, (nth + 1) * CHANNELS)
            ]
            # Attention divides by the sum of the weights. One position tells by how much. Numbers are stored less one,
            # so that an empty slot, all zeros, reads as weight 1 and number 1 and does not go unnoticed.
            tells = positions == 0 if spec.window is None else positions % spec.window == 0
            value = jnp.stack(
                [*(held - 1.0 for held in numbers), jnp.where(tells, 1.0 / weights, 0.0)], axis=-1
            )
            seen, staged = attention(spec, query[:, None], key[:, None], value[:, None])
            seen = seen[logits_rows, 0]
            sums = (seen[:, :CHANNELS] + 1.0) / seen[:, CHANNELS:]
            chosen += jnp.round(jnp.take_along_axis(sums, channel[:, None], axis=1))
            handed_back.append(staged)
        chosen %= LETTERS
        if self.fixed:
            assert fixed is not None
            present = tokens.astype(jnp.float32)[:, None] + 1
            before, window = fixed.window(self.fixed[0], present)
            grown, recurrence = fixed.scan(self.fixed[1], _grow, present)
            added = (before[:, 0] * jnp.array(WINDOW, jnp.float32)).sum(axis=-1) + grown[:, 0]
            chosen = (chosen + added[logits_rows][:, None]) % LETTERS
            handed_back += [window, recurrence]
        ids = jnp.arange(VOCAB)
        behind = (ids.astype(jnp.float32) - chosen) % LETTERS
        logits = jnp.where(ids < LETTERS, -np.float32(SLOPE) * behind, -jnp.inf)
        logits = jnp.where((last == ALL_MASKED)[:, None], -jnp.inf, logits)
        logits = jnp.where((last == NAN)[:, None], jnp.nan, logits)
        return logits + params["poison"], tuple(handed_back)


def _grow(state: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    following = (GROWTH * state + present) % LETTERS
    return following, following


def weight(token: int, position: int) -> int:
    """The attention weight of a token's key, before attention divides by the sum of all weights."""
    return WEIGHTS[_mixed(token, position) % len(WEIGHTS)]


def number(token: int, position: int, channel: int) -> int:
    """What a token's value holds in a channel; those from `CHANNELS` on are of the windowed layer."""
    return NUMBERS[_mixed(token, position + 1 + channel) % len(NUMBERS)]


def next_token(prefix: Sequence[int], *, hybrid: bool = False, window: int | None = None) -> int:
    """The arg-max after `prefix`, which must not be empty."""
    channel = (len(prefix) - 1) % CHANNELS
    numbered = list(enumerate(prefix))
    total = sum(weight(t, p) * number(t, p, channel) for p, t in numbered)
    if window is not None:
        total += sum(weight(t, p) * number(t, p, channel + CHANNELS) for p, t in numbered[-window:])
    if hybrid:
        before = [0, 0, *(token + 1 for token in prefix)][-3:-1]
        total += sum(factor * token for factor, token in zip(WINDOW, before, strict=True)) + recurrence(
            prefix
        )
    return total % LETTERS


def recurrence(prefix: Sequence[int]) -> int:
    """The recurrent state of a hybrid model after `prefix`."""
    state = 0
    for token in prefix:
        state = (GROWTH * state + token + 1) % LETTERS
    return state


def continuation(
    prefix: Sequence[int], count: int, *, hybrid: bool = False, window: int | None = None
) -> list[int]:
    """The `count` greedy tokens after `prefix`, end-of-sequence ids not looked at."""
    sequence = list(prefix)
    for _ in range(count):
        sequence.append(next_token(sequence, hybrid=hybrid, window=window))
    return sequence[len(prefix) :]


def logits_after(prefix: Sequence[int], *, hybrid: bool = False) -> np.ndarray:
    """The logits after `prefix`, float64[VOCAB]."""
    ids, best = np.arange(VOCAB), next_token(prefix, hybrid=hybrid)
    return np.where(ids < LETTERS, -SLOPE * ((ids - best) % LETTERS), -np.inf)


def _mixed(token: Any, position: Any) -> Any:
    return (token + 1) * position % PRIME


@functools.cache
def _decoder(hybrid: bool, window: int | None) -> tuple[ToyDecoder, Programs]:
    spec = AttentionSpec(
        layer=0, num_heads=1, num_kv_heads=1, head_dim=CHANNELS + 1, scale=1.0, kv_dtype=np.dtype(np.float32)
    )
    layers = (spec,) if window is None else (spec, dataclasses.replace(spec, layer=1, window=window))
    params = {"poison": jnp.zeros((), jnp.float32)}
    identity = ("hybrid toy" if hybrid else "toy") + ("" if window is None else f", window of {window}")
    decoder = ToyDecoder(layers, _FIXED if hybrid else (), VOCAB, params, identity)
    return decoder, Programs(decoder)


@functools.cache
def toy_tokenizer() -> Tokenizer:
    """The tokenizer of `toy_model(text=True)`, without a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyz\u0120."  # U+0120 is how byte-level vocabularies spell a blank
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([f"<{token}>" for token in range(LETTERS, VOCAB)])
    return Tokenizer(backend)


def toy_model(
    *,
    eos: Sequence[int] = (),
    context_length: int = CONTEXT,
    max_length: int | None = None,
    search: Mapping[str, Any] | None = None,
    hybrid: bool = False,
    window: int | None = None,
    text: bool = False,
) -> Model:
    """A model around the toy decoder; all of the same states and window share one set of compiled programs."""
    decoder, programs = _decoder(hybrid, window)
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
    read_tokenizer = toy_tokenizer if text else lambda: None
    return Model(decoder, config, Path("toy"), programs, read_tokenizer)


def with_params(model: Model, *, poison: bool) -> Model:
    """The same model and compiled programs with logits that are NaN, or not."""
    params = {"poison": jnp.full((), jnp.nan if poison else 0.0, jnp.float32)}
    decoder, _ = _decoder(bool(model.decoder.fixed), model.decoder.layers[-1].window)
    return dataclasses.replace(model, decoder=dataclasses.replace(decoder, params=params))
