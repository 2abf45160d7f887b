"""The kernels of which a report is made."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tests.hopper import attention_cases, publication_cases, quantised_cases, samples
from tests.hopper.registered import Registered


def _heads(head_dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 1024, 4, head_dim), jnp.float16)


KERNELS = (
    Registered("copy", samples.copy, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)),
    Registered("JAX's attention", functools.partial(samples.attention, 64), (_heads(64),) * 3),
    *(
        Registered(f"attention: {name}", case.function, case.shapes)
        for name, case in attention_cases.CASES.items()
    ),
    *(dataclasses.replace(case, name=f"attention: {case.name}") for case in quantised_cases.CASES),
    *(
        Registered(f"publication: {name}", case.function, case.shapes)
        for name, case in publication_cases.CASES.items()
    ),
)
