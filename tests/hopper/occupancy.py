"""How many blocks of a kernel one core of a Hopper card holds at once, and what limits them.

Limits: CUDA C++ Programming Guide, technical specifications of compute capability 9.0. Granularity of registers
(256 a warp, and each warp's in one quarter of the core) and of shared memory (128 bytes, and 1 KiB a block for the
system): CUDA's occupancy calculator.
"""

from __future__ import annotations

import dataclasses

WARP = 32
THREADS_PER_BLOCK = 1024
THREADS_PER_CORE = 2048
BLOCKS_PER_CORE = 32
REGISTERS_PER_CORE = 65536
SHARED_PER_CORE = 233472
SHARED_PER_BLOCK = 232448
"""At most, for a kernel that opts in, as Mosaic GPU's do."""

_SHARED_OF_SYSTEM = 1024
_QUARTERS = 4


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks a core, the warps in them as a share of what a core can hold, and the scarce resource."""

    blocks: int
    share: float
    limit: str


def occupancy(threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """What a core holds of blocks with `threads` threads of `registers` registers each and `shared_bytes` together.

    Zero blocks mean that the kernel can't be launched. Raises ValueError if `threads` or `registers` isn't positive.
    """
    if threads < 1 or registers < 1:
        raise ValueError(
            f"a block has threads and registers, not {threads} and {registers}; pass what ptxas says"
        )
    warps = -(-threads // WARP)
    warps_by_registers = _QUARTERS * (REGISTERS_PER_CORE // _QUARTERS // _round_up(registers * WARP, 256))
    shared = _round_up(shared_bytes + _SHARED_OF_SYSTEM, 128)
    blocks = {
        "threads": 0 if threads > THREADS_PER_BLOCK else THREADS_PER_CORE // (warps * WARP),
        "registers": warps_by_registers // warps,
        "shared memory": 0 if shared_bytes > SHARED_PER_BLOCK else SHARED_PER_CORE // shared,
        "blocks": BLOCKS_PER_CORE,
    }
    limit = min(blocks, key=blocks.__getitem__)
    return Occupancy(blocks[limit], blocks[limit] * warps * WARP / THREADS_PER_CORE, limit)


def _round_up(amount: int, unit: int) -> int:
    return -(-amount // unit) * unit
