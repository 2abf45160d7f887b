"""Choosing a token for each row: its logits edited, then arg-max, or temperature, top-k, top-p and min-p and a draw.

On a processor rows run one after the other through one small program, so a row's choice cannot depend on its company,
and what a row leaves off is skipped: a greedy row pays for an arg-max only. On a GPU they run side by side. A row's
logits lie in `_COLUMNS` columns, so that every sum is one of columns, which XLA on CPU adds in a fixed order and with
vectors; nothing is sorted. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array

SAMPLE_PURPOSE = 0
"""Folded into the key of the draw that chooses a token, to keep it apart from other draws at the same position."""

_COLUMNS = 256
"""Columns of a row of logits: id c + 256 b is entry c of block b."""

_LISTED = 128
"""Best ids that are listed in order, which spares most filters a search."""


class SamplingRows(NamedTuple):
    """Settings of each row.

    Attributes:
        temperature: float32[rows], 0 for arg-max.
        top_k: int32[rows], 0 for off.
        top_p: float32[rows], 1 for off.
        min_p: float32[rows], 0 for off.
        seed: uint32[rows].
        position: int32[rows], the sequence position that the token will take.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    position: Array


class Edits(NamedTuple):
    """What changes each row's logits before anything is chosen, in the order of the attributes.

    Attributes:
        repetition: float32[rows], divides positive logits and multiplies others of ids in `history`; 1 for off.
        presence: float32[rows], subtracted from the logits of ids in the turn's output; 0 for off.
        frequency: float32[rows], the same, times how often the id is there; 0 for off.
        history: int32[rows, entries], the sequence, padded with -1.
        output_from: int32[rows], where in `history` the turn's output begins; its length where there is none.
        bias_ids: int32[rows, biases], each id at most once, padded with -1.
        bias: float32[rows, biases], finite, added to the logits of `bias_ids`.
        allowed: uint32[rows, ceil(vocab / 32)], bit b of word w stands for id 32 w + b; 0 masks the id.
    """

    repetition: Array
    presence: Array
    frequency: Array
    history: Array
    output_from: Array
    bias_ids: Array
    bias: Array
    allowed: Array


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities; -inf is an id that was cut.

    Attributes:
        chosen: float32[rows], of the chosen token.
        ids: int32[rows, top], the likeliest, best first.
        values: float32[rows, top], theirs.
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
        tokens: int32[rows], within the vocabulary even where a row isn't usable.
        usable: bool[rows], whether the best edited logit is a finite number and no logit of the model is NaN.
        logprobs: None where none were asked for.
    """

    tokens: jax.Array
    usable: jax.Array
    logprobs: Logprobs | None


def choose(
    logits: jax.Array,
    rows: SamplingRows,
    edits: Edits | None = None,
    *,
    known_ids: int,
    top: int | None = None,
    processed: Array | None = None,
    targets: Array | None = None,
) -> Choice:
    """Chooses one token a row; traced under jit.

    On a CPU a row's result has the same bits whatever the other rows are, how far `history` and biases are padded, and
    whether `edits` and `top` are given. Its random numbers depend on its seed, its position and the purpose only.

    Args:
        logits: float32[rows, vocab], the model's own.
        rows: The rows' settings.
        edits: What changes the logits; None where no row has any.
        known_ids: Ids from here on have no token and are never chosen.
        top: How many of the likeliest ids to give logprobs of, beside the chosen one, at most the vocabulary; None for
            no logprobs.
        processed: bool[rows], which rows' logprobs are of the distribution that was drawn from, where temperature
            counts as 1 for an arg-max; the others', and all by default, are of the model's own logits.
        targets: int32[rows], whose logprob a row gives in place of its chosen token's; -1, and by default, that one's.
    """
    count, vocab = logits.shape
    known = logits[:, :known_ids]
    clean = ~jnp.isnan(logits.max(axis=-1))
    best = _arg_max(known)
    finite = jnp.isfinite(known.max(axis=-1))
    edited = jnp.zeros(count, bool) if edits is None else _any_edit(edits)
    from_processed = jnp.zeros(count, bool) if processed is None else jnp.asarray(processed)

    def work(i: jax.Array) -> tuple[jax.Array, jax.Array, Logprobs | None]:
        own: SamplingRows = jax.tree.map(lambda x: jnp.asarray(x)[i], rows)
        values = _in_columns(known[i])
        if edits is not None:
            own_edits: Edits = jax.tree.map(lambda x: jnp.asarray(x)[i], edits)
            values = jax.lax.cond(edited[i], lambda: _edit(values, own_edits), lambda: values)
        values = _without_negative_zero(values)
        highest = _highest(values)
        drawn = own.temperature > 0
        # A factor, for XLA may turn a quotient into one here and not there; its bounds keep it a normal number.
        coldness = jnp.where(drawn, 1 / jnp.clip(own.temperature, 1e-30, 1e30), 1.0)
        weights = jax.lax.cond(
            drawn | from_processed[i],
            lambda: _weights(values, highest, coldness, own),
            lambda: jnp.zeros_like(values),
        )
        token = jax.lax.cond(drawn, lambda: _draw(weights, own), lambda: _lowest(values == highest))
        if top is None:
            return token, jnp.isfinite(highest), None

        def of_processed() -> jax.Array:
            kept = jnp.where(weights > 0, values, -jnp.inf).reshape(-1)[:known_ids]
            return jnp.pad(kept, (0, vocab - known_ids), constant_values=-jnp.inf)

        scores = jax.lax.cond(from_processed[i], of_processed, lambda: _without_negative_zero(logits[i]))
        factor = jnp.where(from_processed[i], coldness, 1.0)
        target = jnp.int32(-1) if targets is None else jnp.asarray(targets)[i]
        asked = jnp.where(target < 0, token, target)
        return token, jnp.isfinite(highest), _logprobs(scores, factor, asked, top)

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array, Logprobs | None]:
        if top is not None:
            return work(i)
        needed = (jnp.asarray(rows.temperature)[i] > 0) | edited[i]
        return jax.lax.cond(needed, work, lambda i: (best[i], finite[i], None), i)

    # A processor takes rows one by one, each through what it asks for alone; a GPU takes all side by side.
    tokens, good, logprobs = jax.lax.platform_dependent(
        jnp.arange(count), cuda=jax.vmap(one), default=functools.partial(jax.lax.map, one)
    )
    return Choice(tokens, good & clean, logprobs)


def _any_edit(edits: Edits) -> jax.Array:
    """bool[rows], whether anything changes a row's logits."""
    penalised = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    biased = jnp.asarray(edits.bias_ids >= 0).any(axis=-1)
    masked = jnp.asarray(edits.allowed != np.uint32(0xFFFFFFFF)).any(axis=-1)
    return penalised | biased | masked


def _edit(values: jax.Array, edits: Edits) -> jax.Array:
    """The edited logits of one row, float32[blocks, columns] as `values`."""
    size = values.size
    flat = values.reshape(-1)

    def penalised() -> jax.Array:
        # A negative index would count from the end; one past it is dropped.
        ids = jnp.where(edits.history < 0, size, edits.history)
        output = jnp.arange(len(ids)) >= edits.output_from
        seen = jnp.zeros(size, bool).at[ids].set(True, mode="drop")
        times = jnp.zeros(size, jnp.int32).at[ids].add(output.astype(jnp.int32), mode="drop")
        repeated = jnp.where(flat > 0, flat / edits.repetition, flat * edits.repetition)
        penalty = jnp.where(times > 0, edits.presence, 0.0) + edits.frequency * times.astype(jnp.float32)
        return jnp.where(seen, repeated, flat) - penalty

    some = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    flat = jax.lax.cond(some, penalised, lambda: flat)
    flat = flat.at[jnp.where(edits.bias_ids < 0, size, edits.bias_ids)].add(edits.bias, mode="drop")
    allowed = (edits.allowed[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = allowed.reshape(-1)[:size]
    allowed = jnp.pad(allowed, (0, size - len(allowed)))
    return jnp.where(allowed == 1, flat, -jnp.inf).reshape(values.shape)


def _weights(values: jax.Array, highest: jax.Array, coldness: jax.Array, row: SamplingRows) -> jax.Array:
    """Probabilities of what the filters keep, over the best one's, which is 1: float32[blocks, columns]."""
    weights = jnp.exp((values - highest) * coldness)

    def heads() -> jax.Array:
        best, ids = jax.lax.top_k(values.reshape(-1), min(_LISTED, values.size))

        def top_k() -> jax.Array:
            kept = _head(values, jnp.ones_like(values), jnp.float32(row.top_k), best, ids)
            return jnp.where(kept, weights, 0.0)

        left = jax.lax.cond((row.top_k > 0) & (row.top_k < values.size), top_k, lambda: weights)

        def top_p() -> jax.Array:
            # Above 0, so that the best token is kept.
            needed = jnp.maximum(row.top_p * _total(left), 1e-30)
            return jnp.where(_head(values, left, needed, best, ids), left, 0.0)

        return jax.lax.cond(row.top_p < 1, top_p, lambda: left)

    weights = jax.lax.cond((row.top_k > 0) | (row.top_p < 1), heads, lambda: weights)
    return jnp.where(weights >= row.min_p, weights, 0.0)


def _head(
    values: jax.Array, weights: jax.Array, needed: jax.Array, best: jax.Array, best_ids: jax.Array
) -> jax.Array:
    """The fewest best entries whose weights sum to `needed` or more, which all together do: bool[blocks, columns].

    Where the listed best ones don't get there, bisection finds what does: sums of ever more nonnegative numbers in one
    fixed order never fall.

    Args:
        values: float32[blocks, columns], what makes an entry better; -0 nowhere.
        weights: float32[blocks, columns], not negative.
        needed: float32, above 0.
        best: float32[listed], the highest values, falling, ties by id.
        best_ids: int32[listed], their ids.
    """
    ids = _ids(values)
    reached = jnp.cumsum(weights.reshape(-1)[best_ids]) >= needed

    def listed() -> tuple[jax.Array, jax.Array]:
        last = reached.argmax()
        return best[last], best_ids[last]

    def searched() -> tuple[jax.Array, jax.Array]:
        def reaches(kept: jax.Array) -> jax.Array:
            return _total(jnp.where(kept, weights, 0.0)) >= needed

        highest = _ordered(best[0])
        # Where rows go side by side, one that has no need to search ends at once.
        lowest = jnp.where(reached.any(), highest, _ordered(jnp.float32(-jnp.inf)))
        floor = _from_ordered(
            _last_true(lambda place: reaches(values >= _from_ordered(place)), lowest, highest)
        )
        above, tied = values > floor, values == floor

        def among_ties() -> jax.Array:
            first, last = jnp.int32(1 - values.size), jnp.int32(0)
            return -_last_true(lambda place: reaches(above | (tied & (ids <= -place))), first, last)

        return floor, jax.lax.cond(tied.sum() > 1, among_ties, lambda: jnp.int32(values.size))

    floor, last = jax.lax.cond(reached.any(), listed, searched)
    return (values > floor) | ((values == floor) & (ids <= last))


def _last_true(test: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """The largest int32 from `low` to `high` that passes a test that `low` and all up to some number pass."""

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        passed = test(middle)
        return jnp.where(passed, middle, low), jnp.where(passed, high, middle - 1)

    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]


def _ordered(number: jax.Array) -> jax.Array:
    """int32 in the order of float32 numbers; `_from_ordered` goes back."""
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(place: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(place ^ ((place >> 31) & 0x7FFFFFFF), jnp.float32)


def _draw(weights: jax.Array, row: SamplingRows) -> jax.Array:
    """Draws an id by its weight: a column by the columns' sums, then an entry of it, each by a number of its own."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(row.seed), row.position), SAMPLE_PURPOSE)
    first, second = jax.random.uniform(key, (2,))
    column = _pick(weights.sum(axis=0), first)
    block = _pick(weights[:, column], second)
    return block * _COLUMNS + column


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The place where the running sum of float32[n] passes `uniform` of the whole; never one of weight 0."""
    running = jnp.cumsum(weights)
    passed = (running > uniform * running[-1]) & (weights > 0)
    # Rounding may leave none: a running sum is no running sum to the last bit where it is made as a tree.
    return jnp.where(passed.any(), passed.argmax(), weights.argmax()).astype(jnp.int32)


def _logprobs(scores: jax.Array, factor: jax.Array, token: jax.Array, top: int) -> Logprobs:
    """Of softmax(factor * scores), float32[vocab]."""
    columns = _in_columns(scores)
    highest = _highest(columns)
    normaliser = jnp.log(_total(jnp.exp((columns - highest) * factor)))
    # Chosen by score, since logprobs may tie by rounding.
    found, ids = jax.lax.top_k(scores, top)
    of = jnp.append(found, scores[token])
    values = (of - highest) * factor - normaliser
    return Logprobs(values[-1], ids.astype(jnp.int32), values[:-1])


def _in_columns(row: jax.Array) -> jax.Array:
    """float32[n] as [blocks, columns], padded with -inf."""
    blocks = -(-len(row) // _COLUMNS)
    padded = jnp.pad(row, (0, blocks * _COLUMNS - len(row)), constant_values=-jnp.inf)
    return padded.reshape(blocks, _COLUMNS)


def _without_negative_zero(values: jax.Array) -> jax.Array:
    """Ordering by bits, as `lax.top_k` does, puts -0 below 0, with which it ties."""
    return jnp.where(values == 0, 0.0, values)


def _ids(values: jax.Array) -> jax.Array:
    return jnp.arange(values.size, dtype=jnp.int32).reshape(values.shape)


def _total(values: jax.Array) -> jax.Array:
    return values.sum(axis=0).sum()


def _highest(values: jax.Array) -> jax.Array:
    return values.max(axis=0).max()


def _lowest(mask: jax.Array) -> jax.Array:
    """The lowest id in a mask [blocks, columns]; 0 where there is none."""
    ids = jnp.where(mask, _ids(mask), mask.size).min(axis=0).min()
    return jnp.where(ids < mask.size, ids, 0)


def _arg_max(logits: jax.Array) -> jax.Array:
    """int32[rows]; as `jnp.argmax`, but XLA on CPU runs a maximum and a minimum several times faster than its pair."""
    vocab = logits.shape[-1]
    ids = jnp.where(
        logits == logits.max(axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1
    )
    return ids.min(axis=-1)
