"""Finds the Mosaic GPU kernels of a lowered program: how each is launched, and its PTX.

A program calls such a kernel by a custom call that carries the kernel's own module. The launch is read from there. The
PTX is what Mosaic GPU prints when asked by MOSAIC_GPU_DUMP_PTX while the call is compiled alone, so there's no doubt
whose it is; it compiles a kernel once a process, so the text is kept by the kernel's hash.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func

from tests.hopper.kernel import Kernel, Launch

CALL = "mosaic_gpu_v2"

_ptx_by_hash: dict[bytes, str] = {}


def kernels_of(module: ir.Module, compile_module: Callable[[ir.Module], Any]) -> tuple[Kernel, ...]:
    """The distinct kernels that a StableHLO module calls, in order of their calls; the module stays as it is."""
    found = []
    for call in _calls(module):
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        key = ir.StringAttr(config["kernel_hash"]).value_bytes
        if key not in _ptx_by_hash:
            _ptx_by_hash[key] = _printed_ptx(functools.partial(compile_module, _alone(call)))
        ptx = _ptx_by_hash[key]
        (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
        found.append(Kernel(name, _launch(ir.StringAttr(config["module"]).value_bytes), ptx))
    # Not by the hash: that of JAX 0.11 changes with the order in which kernels are lowered.
    return tuple(dict.fromkeys(found))


def _calls(module: ir.Module) -> list[ir.Operation]:
    found = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        called = (
            operation.attributes["call_target_name"] if operation.name == "stablehlo.custom_call" else None
        )
        if called is not None and ir.StringAttr(called).value == CALL:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _alone(call: ir.Operation) -> ir.Module:
    """A module whose one function makes the same call with its own arguments."""
    results = [result.type for result in call.results]
    with call.context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            main = func.FuncOp("main", ([operand.type for operand in call.operands], results))
        with ir.InsertionPoint(main.add_entry_block()):
            attributes = {name: call.attributes[name] for name in _names(call.attributes)}
            copy = ir.Operation.create(
                call.name, results=results, operands=list(main.arguments), attributes=attributes
            )
            func.ReturnOp(list(copy.results))
    return module


def _names(attributes: Any) -> list[str]:
    """Names in an attribute map, which yields names or, in older JAX, named attributes."""
    return [one if isinstance(one, str) else one.name for one in attributes]


def _launch(bytecode: bytes) -> Launch:
    """Reads `gpu.launch` in a kernel's module, whose operands are constants."""
    context = mlir.make_ir_context()
    mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = (
        True  # the module is stored in a stable form, under names of its own
    )
    context.load_all_available_dialects()
    found = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name.endswith("gpu.launch"):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    with context:
        module = ir.Module.parse(bytecode)
        module.operation.walk(visit)
        (launch,) = found
        # Async tokens, grid, block, cluster, preferred cluster, shared memory: how many operands each has.
        sizes = list(ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"]))
        values = [_constant(operand) for operand in list(launch.operands)[sizes[0] :]]
    x, y, z = values[:3], values[3:6], values[6:-1]
    return Launch(tuple(x), tuple(y), tuple(z[:3]) or None, values[-1])


def _constant(value: ir.Value) -> int:
    return ir.IntegerAttr(value.owner.attributes["value"]).value


def _printed_ptx(compile_kernel: Callable[[], object]) -> str:
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    try:
        with _standard_output() as read:
            compile_kernel()
            printed = read()
    finally:
        del os.environ["MOSAIC_GPU_DUMP_PTX"]
    start = printed.find(".version")
    if start < 0:
        raise RuntimeError(
            "Mosaic GPU printed no PTX; was the kernel compiled in this process before? Start a new one"
        )
    return printed[start:]


@contextlib.contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """Yields a function that reads what the process, its C++ part included, has printed since."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode()

        try:
            os.dup2(file.fileno(), 1)
            yield read
        finally:
            os.dup2(saved, 1)
            os.close(saved)
