"""Prints what became of each registered kernel, as a Markdown table: `python -m tests.hopper.report`."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from tests.hopper.compiling import compile_for_hopper
from tests.hopper.instructions import LOADS, MATH, Kind, share
from tests.hopper.kernel import Kernel
from tests.hopper.registered import Registered
from tests.hopper.registry import KERNELS

HEADER = (
    "Kernel",
    "Threads",
    "Registers",
    "Spilled bytes",
    "Shared bytes",
    "Blocks a core",
    "Limit",
    "Bulk copies",
    "wgmma",
    "Loop: loads / math / rest",
)


def table(registered: Iterable[Registered]) -> str:
    """A row for each kernel that the registered functions call."""
    rows = [HEADER, ("---",) * len(HEADER)]
    for one in registered:
        rows += [_row(one.name, kernel) for kernel in compile_for_hopper(one.function, *one.shapes).kernels]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(name: str, kernel: Kernel) -> tuple[str, ...]:
    machine, fits = kernel.machine, kernel.occupancy
    loop = sum((collections.Counter(counts) for counts in kernel.loops()), collections.Counter())
    loads, math = share(loop, LOADS), share(loop, MATH)
    figures = (
        kernel.launch.threads,
        machine.registers,
        machine.spill_store_bytes + machine.spill_load_bytes,
        kernel.shared_bytes,
        fits.blocks,
        fits.limit,
        kernel.sass_counts.get(Kind.BULK_COPY, 0),
        kernel.sass_counts.get(Kind.WGMMA, 0),
        f"{loads:.0%} / {math:.0%} / {1 - loads - math:.0%}" if loop else "none",
    )
    return (name, *map(str, figures))


if __name__ == "__main__":
    print(table(KERNELS))
