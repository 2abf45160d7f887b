"""Random arrays, made on the device in no more room than they take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_DRAWN_BLOCKS = 1024


def random_key(seed: int) -> jax.Array:
    """A key of the generator that devices have built in, which compiles in no time and fills memory fast."""
    return jax.random.key(seed, impl="rbg")


def random_blocks(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal random blocks [num_blocks, ...]; a large pool repeats some of them, as it needs no room but its own."""
    few = jax.random.normal(key, (min(shape[0], _DRAWN_BLOCKS), *shape[1:]), dtype)
    return few if len(few) == shape[0] else few[jnp.arange(shape[0], dtype=jnp.int32) % len(few)]
