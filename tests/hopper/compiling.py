"""Compiles a JAX function for a Hopper card on a machine without one, and keeps what can be learnt from that.

`Lowered.compile` would do without memory kinds only: a device that only compiles reports none, and it crashes on arrays
in host memory. So the arguments lie on an abstract mesh of one device and the StableHLO goes to the client itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax._src.compiler import get_compile_options
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from tests.hopper.kernel import Kernel
from tests.hopper.mosaic import kernels_of
from tests.hopper.topology import device, topology


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. `hlo` is optimised and scheduled; sizes are bytes, `temporary` and `aliased` on the card."""

    hlo: str
    temporary_bytes: int
    aliased_bytes: int
    argument_bytes: int
    output_bytes: int
    host_argument_bytes: int
    kernels: tuple[Kernel, ...]


def in_host_memory(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array in the host's pinned memory."""
    return _placed(shape, "pinned_host")


def compile_for_hopper(function: Callable[..., Any], *shapes: Any, **jit_options: Any) -> Program:
    """Compiles `jax.jit(function, **jit_options)` for arguments of the given shapes, pytrees of ShapeDtypeStruct.

    Arrays lie in the card's memory unless `in_host_memory` says otherwise. Raises what JAX, Mosaic GPU and XLA raise.
    """
    topology()  # before JAX looks for devices, since it settles how the plugin starts
    placed = jax.tree.map(lambda shape: shape if shape.sharding else _placed(shape, "device"), shapes)
    lowered = jax.jit(function, **jit_options).trace(*placed).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    kernels = kernels_of(module, _compile)
    executable = _compile(module)
    (hlo,) = executable.hlo_modules()
    memory = executable.get_compiled_memory_stats()
    return Program(
        hlo=hlo.to_string(),
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        host_argument_bytes=memory.host_argument_size_in_bytes,
        kernels=kernels,
    )


def _placed(shape: jax.ShapeDtypeStruct, memory_kind: str) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(AbstractMesh((1,), ("x",)), PartitionSpec(), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _compile(module: Any) -> Any:
    options = get_compile_options(num_replicas=1, num_partitions=1, device_assignment=[[0]])
    return device().client.compile(module, _jax.DeviceList((device(),)), options)
