"""What the importer and the engine agree on: the attention callable and the facts it gets about a layer."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np


@dataclass(frozen=True)
class AttentionSpec:
    """One causal attention layer. `scale` multiplies query-key products; `kv_dtype` is float32 or float16."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    kv_dtype: np.dtype


class Attention(Protocol):
    """Supplied by the caller of `Decoder.apply`; it owns the past, the masking and the storage of keys."""

    def __call__(
        self, spec: AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Attend with this step's tokens, rotary embedding already applied.

        query is [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim], in `kv_dtype`.
        Returns the output, shaped and typed like query, and any pytree to hand back to the caller.
        """
        ...
