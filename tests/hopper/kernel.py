"""A compiled kernel as a value: its launch, its PTX, and what follows from them."""

from __future__ import annotations

import dataclasses
import functools

from tests.hopper.instructions import Counts, Kind, count_ptx, count_sass
from tests.hopper.loops import innermost_loops, parse
from tests.hopper.machine_code import MachineCode, assemble
from tests.hopper.occupancy import Occupancy, occupancy


@dataclasses.dataclass(frozen=True)
class Launch:
    """Blocks in the grid, threads in a block, blocks in a cluster (None without clusters), shared bytes a block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        x, y, z = self.block
        return x * y * z


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, compiled; `name` is its entry in the PTX."""

    name: str
    launch: Launch
    ptx: str

    @functools.cached_property
    def machine(self) -> MachineCode:
        """What ptxas makes of it."""
        return assemble(self.ptx)

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block, static and of the launch."""
        return self.launch.shared_bytes + self.machine.shared_bytes

    @property
    def occupancy(self) -> Occupancy:
        """What a core holds of it."""
        return occupancy(self.launch.threads, self.machine.registers, self.shared_bytes)

    @functools.cached_property
    def ptx_counts(self) -> Counts:
        """Instructions in the PTX, by kind."""
        return count_ptx(self.ptx)

    @functools.cached_property
    def sass_counts(self) -> Counts:
        """Instructions in the machine code, by kind."""
        return count_sass(one.name for one in parse(self.machine.sass).instructions)

    def loops(self, kind: Kind = Kind.WGMMA) -> list[Counts]:
        """Machine instructions, by kind, in each innermost loop that holds one of `kind`."""
        return [count_sass(names) for names in innermost_loops(parse(self.machine.sass), kind)]
