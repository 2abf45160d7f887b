"""The rules of choosing a token, row by row in NumPy: sort, add up, cut; and rows as arguments of `choose`."""

import dataclasses

import numpy as np

from jaxengine.sampling import Edits, SamplingRows


@dataclasses.dataclass(frozen=True)
class Row:
    """A row's logits and settings; `masked` ids may not be chosen."""

    logits: np.ndarray
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    history: tuple[int, ...] = ()
    output_from: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    masked: tuple[int, ...] = ()


def edited(row, known_ids):
    """float32[vocab]: repetition, presence, frequency, bias, mask."""
    values = np.array(row.logits, np.float32)
    output = row.history[row.output_from :]
    with np.errstate(over="ignore"):
        for token in set(row.history):
            factor = np.float32(row.repetition)
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        for token in set(output):
            penalty = row.presence + row.frequency * output.count(token)
            values[token] -= np.float32(penalty)
        for token, bias in row.bias:
            values[token] += np.float32(bias)
    values[list(row.masked)] = -np.inf
    values[known_ids:] = -np.inf
    return values


def ranked(values):
    """Ids, best first, ties lowest first."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def distribution(row, known_ids, slack=0.0):
    """float64[vocab], what a token is drawn from: temperature, top-k, renormalised, top-p, min-p; 0 was cut.

    The best is kept in any case. `slack` moves the borders of top-p and min-p to let in more, by that part.
    """
    values = edited(row, known_ids)
    order = ranked(values)
    with np.errstate(over="ignore"):
        below = (values - values[order[0]]).astype(np.float64)
    weights = np.exp(below[order] / min(np.float64(np.float32(row.temperature or 1.0)), 1e30))
    if row.top_k:
        weights[row.top_k :] = 0
    if row.top_p < 1:
        before = (np.cumsum(weights) - weights) / weights.sum()
        weights[1:][before[1:] >= np.float64(np.float32(row.top_p)) * (1 + slack)] = 0
    weights[1:][weights[1:] < np.float64(np.float32(row.min_p)) * (1 - slack)] = 0
    result = np.zeros(len(values))
    result[order] = weights / weights.sum()
    return result


def logits_of(rows):
    return np.stack([row.logits for row in rows]).astype(np.float32)


def settings_of(rows):
    def column(name, kind):
        return np.array([getattr(row, name) for row in rows], kind)

    return SamplingRows(
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("seed", np.uint32),
        column("position", np.int32),
    )


def edits_of(rows, entries=16, biases=4):
    """The rows' edits, histories padded to `entries` and biases to `biases`."""
    count, vocab = len(rows), len(rows[0].logits)
    history, bias_ids = np.full((count, entries), -1, np.int32), np.full((count, biases), -1, np.int32)
    bias = np.zeros((count, biases), np.float32)
    bits = np.ones((count, -(-vocab // 32) * 32), np.uint32)
    for i, row in enumerate(rows):
        history[i, : len(row.history)] = row.history
        bits[i, list(row.masked)] = 0
        for j, (token, amount) in enumerate(row.bias):
            bias_ids[i, j], bias[i, j] = token, amount
    words = (bits.reshape(count, -1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)

    def column(name, kind=np.float32):
        return np.array([getattr(row, name) for row in rows], kind)

    penalties = column("repetition"), column("presence"), column("frequency")
    return Edits(*penalties, history, column("output_from", np.int32), bias_ids, bias, words)
