"""The kernels of which a report is made: a name, a function, and the shapes of its arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.hopper import attention_cases, publication_cases, samples


@dataclasses.dataclass(frozen=True)
class Registered:
    """`function` takes pytrees of arrays of `shapes` and calls one kernel or more."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


def _heads(head_dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 1024, 4, head_dim), jnp.float16)


KERNELS = (
    Registered("copy", samples.copy, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)),
    Registered("JAX's attention", functools.partial(samples.attention, 64), (_heads(64),) * 3),
    *(
        Registered(f"attention: {name}", case.function, case.shapes)
        for name, case in attention_cases.CASES.items()
    ),
    *(
        Registered(f"publication: {name}", case.function, case.shapes)
        for name, case in publication_cases.CASES.items()
    ),
)
