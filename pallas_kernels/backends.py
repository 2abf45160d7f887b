"""Where a kernel runs: compiled by Mosaic GPU, interpreted on a CPU, or not at all, its plain XLA form instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

Backend = Literal["mosaic_gpu", "xla", "interpret"]
"""`mosaic_gpu` compiles the kernel, `interpret` runs it on a CPU and looks for races, `xla` is the plain form."""

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and type alone."""


def choose(
    backend: Backend | None,
    kernel: str,
    capabilities: tuple[str, ...],
    refusal_on: Callable[[Backend], str | None],
) -> Backend:
    """Returns the backend of a call.

    Args:
        backend: The caller's choice; None takes the kernel on a GPU that it can run on, and XLA elsewhere.
        kernel: What the kernel is called.
        capabilities: Compute capabilities that it can run on, by their beginnings.
        refusal_on: Says why the kernel does not take the call on a backend other than XLA, None if it does.

    Raises:
        ValueError: There is no such backend, or the kernel is asked for and does not take the shapes.
    """
    if backend is None:
        if not compute_capability().startswith(capabilities):
            return "xla"
        refusal = refusal_on("mosaic_gpu")
        if refusal is not None:
            warn_once(f"the {kernel} kernel is not used, since {refusal}; XLA's form runs instead")
            return "xla"
        return "mosaic_gpu"
    if backend not in ("mosaic_gpu", "interpret", "xla"):
        raise ValueError(f"there is no backend {backend!r}; give 'mosaic_gpu', 'interpret', 'xla' or None")
    if backend != "xla" and (refusal := refusal_on(backend)) is not None:
        raise ValueError(f"the {kernel} kernel can't be used, since {refusal}; give backend='xla'")
    return backend


@functools.cache
def compute_capability() -> str:
    """That of the default device, such as "9.0"; "none" if it is no NVIDIA GPU."""
    device = jax.devices()[0]
    return (
        str(getattr(device, "compute_capability", "none")) if device.platform in ("gpu", "cuda") else "none"
    )


@functools.cache
def warn_once(message: str) -> None:
    """Warns, unless the same has been said before."""
    warnings.warn(message, stacklevel=2)


@functools.cache
def interpretation() -> Any:
    """Pallas' parameters for interpreting a kernel and looking for races."""
    # In newer versions of JAX it is public, in the oldest supported one it isn't.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)
