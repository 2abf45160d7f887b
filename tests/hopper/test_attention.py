"""The attention kernel compiled for Hopper: registers, spills, shared memory, instructions, launches."""

import re

import pytest

from tests.hopper.attention_cases import CASES, AttentionCase
from tests.hopper.compiling import compile_for_hopper
from tests.hopper.instructions import Kind

pytestmark = pytest.mark.hopper

SHARED_BYTES = 227 * 1024
REGISTERS = 64 * 1024
TENSOR_LOADS = 3  # queries, keys and values; the rest of the bulk copies are sinks, and what is written


def registers_taken(kernel) -> int:
    """Registers of a block once its warpgroups have changed theirs; more than there are would wait for ever."""
    changes = {kind: int(most) for kind, most in re.findall(r"setmaxnreg\.(inc|dec)\S* (\d+)", kernel.ptx)}
    if not changes:
        return kernel.machine.registers * kernel.launch.threads
    return 128 * changes["dec"] + (kernel.launch.threads - 128) * changes["inc"]


@pytest.mark.parametrize("name", CASES)
def test_R4_kernel_fits_a_multiprocessor_without_spills(name):
    case = CASES[name]
    (kernel,) = compile_for_hopper(case.function, *case.shapes).kernels
    assert kernel.machine.spill_store_bytes == kernel.machine.spill_load_bytes == 0
    assert not kernel.machine.serialised_wgmma
    assert kernel.shared_bytes <= SHARED_BYTES
    assert kernel.occupancy.blocks >= 1
    assert registers_taken(kernel) <= REGISTERS
    assert kernel.sass_counts[Kind.BULK_COPY] >= TENSOR_LOADS
    # Queries by keys takes a product for 16 elements of the head, weights by values one for 16 keys.
    assert kernel.sass_counts[Kind.WGMMA] >= case.head_dim // 16 + 64 // 16
    assert kernel.loops()


def test_R2_the_split_of_decode_follows_the_bounds_of_the_metadata():
    def blocks(**changes: int) -> int:
        case = AttentionCase(128, **changes)
        (kernel,) = compile_for_hopper(case.function, *case.shapes).kernels
        assert kernel.launch.grid[1:] == (1, 1)
        return kernel.launch.grid[0]

    items = 8
    assert blocks(rows=1) == items * 32  # 8,192 keys in 128 tiles, 4 or more a split
    assert blocks(rows=32) == 32 * items * 2  # two blocks a multiprocessor
    assert blocks(rows=64) == 64 * items
    assert blocks(rows=1, columns=8) == items  # too short to share


def test_C22_more_rows_than_a_launch_takes_along_other_axes():
    case = AttentionCase(128, rows=70_000, columns=4)
    (kernel,) = compile_for_hopper(case.function, *case.shapes).kernels
    assert kernel.launch.grid == (70_000 * 8, 1, 1)


def test_C24_blocks_far_beyond_2_31_elements_are_addressed_by_block():
    case = AttentionCase(128, num_blocks=2**22)
    (kernel,) = compile_for_hopper(case.function, *case.shapes).kernels
    assert 2**22 * 2 * 8 * 16 * 128 > 2**31
    assert kernel.machine.spill_store_bytes == 0


def test_R1_nothing_of_the_pools_size_is_made():
    case = AttentionCase(128)
    program = compile_for_hopper(case.function, *case.shapes)
    pool_bytes = 4096 * 2 * 8 * 16 * 128 * 2
    # Partial results of the splits, packed queries and staged tokens.
    assert program.temporary_bytes < pool_bytes // 32
