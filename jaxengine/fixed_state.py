"""Fixed states: what each resident owns in one slot whatever its length, the past of a short convolution or recurrence.

A request's slot is its place. Every slot has two banks: a step reads one and commit writes the other, which a number on
the host then makes current. So no step writes what the committed state can read, and nothing is copied. A new owner
reads zeros because it has no tokens yet; nothing is ever cleared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onnx_import import FixedSpec, Step

BANKS = 2


class StateRows(NamedTuple):
    """How the rows of a packed step meet their states.

    Attributes:
        start: int32[rows], packed index of the row's first token.
        num_tokens: int32[rows], the row's tokens, 0 for padding.
        source: int32[rows], where in the pool the row's state is.
        owned: bool[rows], whether there is one; without, the row starts from zeros.
        row_of: int32[tokens], each token's row; any row for padding.
    """

    start: np.ndarray | jax.Array
    num_tokens: np.ndarray | jax.Array
    source: np.ndarray | jax.Array
    owned: np.ndarray | jax.Array
    row_of: np.ndarray | jax.Array


class Replay(NamedTuple):
    """What it takes to work out the state after a prefix of a row's tokens.

    Attributes:
        past: dtype[rows, *shape], the states before the step.
        step: What a token does to a state, for a recurrence; None for a window.
        inputs: A pytree of [tokens, ...], what each token brings.
    """

    past: jax.Array
    step: jax.tree_util.Partial | None
    inputs: Any


def state_bytes(specs: tuple[FixedSpec, ...]) -> int:
    """Bytes of one request's states in one bank."""
    return sum(int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize for spec in specs)


class RowStates:
    """The `onnx_import.FixedState` of one packed step.

    Args:
        pools: By name, dtype[BANKS * max_batch_size, *shape]; only read.
        rows: The step's rows.
        replayable: Hand back a `Replay` with each state, for rows of which a prefix may be accepted.
    """

    def __init__(self, pools: Mapping[str, jax.Array], rows: StateRows, *, replayable: bool) -> None:
        self._pools, self._rows, self._replayable = pools, rows, replayable

    def window(self, spec: FixedSpec, values: jax.Array) -> tuple[jax.Array, Any]:
        """See `onnx_import.FixedState`; hands back the states after all tokens, or a pair of them and a `Replay`."""
        past = self._read(spec)
        place = jnp.arange(values.shape[0]) - self._rows.start[self._rows.row_of]
        before = _last(past, values, self._rows, jnp.asarray(self._rows.row_of), place)
        return before, self._staged(Replay(past, None, values), after_window(past, values, self._rows))

    def scan(self, spec: FixedSpec, step: Step, inputs: Any) -> tuple[Any, Any]:
        """See `onnx_import.FixedState`; hands back what `window` does."""
        past = self._read(spec)
        after, outputs = _loop(past, step, inputs, self._rows, self._rows.num_tokens)
        return outputs, self._staged(Replay(past, jax.tree_util.Partial(step), inputs), after)

    def _read(self, spec: FixedSpec) -> jax.Array:
        states = self._pools[spec.name].at[self._rows.source].get(mode="promise_in_bounds")
        owned = jnp.reshape(self._rows.owned, (-1, *(1,) * len(spec.shape)))
        # What an earlier owner left may be anything: it is selected away, not multiplied by zero.
        return jnp.where(owned, states, jnp.zeros((), spec.dtype))

    def _staged(self, replay: Replay, after: jax.Array) -> Any:
        return (after, replay) if self._replayable else after


def after_prefix(rows: StateRows, replay: Replay, accepted: jax.Array) -> jax.Array:
    """The states dtype[rows, *shape] after the first `accepted` int32[rows] tokens of each row."""
    if replay.step is None:
        return after_window(replay.past, replay.inputs, rows._replace(num_tokens=accepted))
    return _loop(replay.past, replay.step, replay.inputs, rows, accepted)[0]


def after_window(past: jax.Array, values: jax.Array, rows: StateRows) -> jax.Array:
    """The last values of each row, dtype[rows, channels, length], after `rows.num_tokens` tokens."""
    return _last(past, values, rows, jnp.arange(past.shape[0]), jnp.asarray(rows.num_tokens))


def _last(past: jax.Array, values: jax.Array, rows: StateRows, row: jax.Array, place: jax.Array) -> jax.Array:
    """The `length` values before each of `place` int32[n] in `row` int32[n]: dtype[n, channels, length]."""
    length = past.shape[2]
    local = place[:, None] - length + jnp.arange(length)
    fresh = jnp.clip(jnp.asarray(rows.start)[row][:, None] + local, 0, values.shape[0] - 1)
    older = past.swapaxes(1, 2)[row[:, None], jnp.clip(local + length, 0, length - 1)]
    return jnp.where(local[..., None] >= 0, values[fresh], older).swapaxes(1, 2)


def _loop(past: jax.Array, step: Step, inputs: Any, rows: StateRows, count: Any) -> tuple[jax.Array, Any]:
    """All rows side by side, a token of each at a time, so that a row's arithmetic is that of one token alone.

    Also where every row has one token: outside a loop XLA compiles the step together with what is around it, and a
    decoder of linear attention got other bits in decode steps than in mixed ones.
    """
    tokens = jax.tree.leaves(inputs)[0].shape[0]

    def of_tokens(index: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[index], inputs)

    def advance(nth: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        state, made = carry
        index = jnp.minimum(rows.start + nth, tokens - 1)
        following, output = step(state, of_tokens(index))
        runs = nth < count
        state = jnp.where(runs.reshape(-1, *(1,) * (state.ndim - 1)), following, state)
        to = jnp.where(runs, index, tokens)
        return state, jax.tree.map(lambda whole, one: whole.at[to].set(one, mode="drop"), made, output)

    shapes = jax.eval_shape(lambda: step(past, of_tokens(jnp.asarray(rows.start)))[1])
    made = jax.tree.map(lambda one: jnp.zeros((tokens, *one.shape[1:]), one.dtype), shapes)
    return jax.lax.fori_loop(0, jnp.max(count), advance, (past, made))
