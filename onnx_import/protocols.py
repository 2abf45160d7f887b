"""What the importer and the engine agree on: the callables that own a sequence's past, and what they are told of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np


@dataclass(frozen=True)
class AttentionSpec:
    """One causal attention layer.

    `scale` multiplies query-key products, `kv_dtype` is the type of query, key and value: float32, float16 or bfloat16.
    With a `window` W the query at position p sees the keys at max(0, p - W + 1) .. p, without one all up to p. With a
    `softcap` c the scaled product s becomes c * tanh(s / c).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kv_dtype: np.dtype
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """Supplied by the caller of `Decoder.apply`; it owns the past, the masking and the storage of keys."""

    def __call__(
        self,
        spec: AttentionSpec,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend with this step's tokens, rotary embedding already applied.

        query is [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim], in `kv_dtype`.
        sinks is float[num_heads], passed by layers that have them: logits that take part in each head's softmax,
        uncapped, and bring no value. Returns the output, shaped and typed like query, and any pytree to hand back
        to the caller.
        """
        ...


@dataclass(frozen=True)
class FixedSpec:
    """A state of fixed size that every sequence owns: the past of a short convolution or of a recurrence.

    `name` is the graph's name for it, `shape` and `dtype` are those of one sequence's state. All zeros is the state of
    a sequence without tokens.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""One token of each sequence: (states [rows, *shape], inputs, a pytree of [rows, ...]) to (states, outputs)."""


class FixedState(Protocol):
    """Supplied by the caller of `Decoder.apply`; it owns the fixed states and knows where sequences begin and end."""

    def window(self, spec: FixedSpec, values: jax.Array) -> tuple[jax.Array, Any]:
        """Give each token the values that came just before it in its own sequence.

        values is [tokens, channels], in `spec.dtype`; a state [channels, length] holds the newest `length` values,
        oldest first. Returns [tokens, channels, length] and any pytree to hand back to the caller.
        """
        ...

    def scan(self, spec: FixedSpec, step: Step, inputs: Any) -> tuple[Any, Any]:
        """Run `step` over the tokens of each sequence in order, from its state on.

        inputs is a pytree of [tokens, ...]. Returns the outputs as a pytree of [tokens, ...], and any pytree to hand
        back to the caller.
        """
        ...
