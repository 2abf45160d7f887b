"""How many blocks a Hopper core holds, against CUDA's published examples and the target's own numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hopper import occupancy as limits
from tests.hopper.occupancy import Occupancy, occupancy
from tests.hopper.topology import TARGET

threads = st.integers(1, 1024)
registers = st.integers(1, 255)
shared = st.integers(0, limits.SHARED_PER_BLOCK)


def test_limits_are_those_of_the_target_that_XLA_compiles_for():
    facts = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)\b", TARGET.read_text())}
    ours = {
        "threads_per_warp": limits.WARP,
        "threads_per_block_limit": limits.THREADS_PER_BLOCK,
        "threads_per_core_limit": limits.THREADS_PER_CORE,
        "registers_per_core_limit": limits.REGISTERS_PER_CORE,
        "shared_memory_per_core": limits.SHARED_PER_CORE,
        "shared_memory_per_block_optin": limits.SHARED_PER_BLOCK,
    }
    assert {name: facts[name] for name in ours} == ours


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ((128, 32, 0), Occupancy(16, 1.0, "threads")),
        ((32, 32, 0), Occupancy(32, 0.5, "blocks")),
        ((384, 168, 51288), Occupancy(1, 0.1875, "registers")),
        ((128, 255, 0), Occupancy(2, 0.125, "registers")),
        ((128, 40, 100_000), Occupancy(2, 0.125, "shared memory")),
        ((128, 40, 232448), Occupancy(1, 0.0625, "shared memory")),
        ((128, 40, 232449), Occupancy(0, 0.0, "shared memory")),
        ((1025, 32, 0), Occupancy(0, 0.0, "threads")),
        ((1024, 65, 0), Occupancy(0, 0.0, "registers")),
    ],
)
def test_blocks_and_their_limit(block, expected):
    assert occupancy(*block) == expected


@given(threads, registers, shared)
def test_what_fits_fits_the_core_and_asking_more_never_fits_more_blocks(block, each, bytes_shared):
    one = occupancy(block, each, bytes_shared)
    assert one.blocks * block <= limits.THREADS_PER_CORE
    assert one.blocks * block * each <= limits.REGISTERS_PER_CORE
    assert one.blocks * (bytes_shared + 1024) <= limits.SHARED_PER_CORE
    assert 0 <= one.share <= 1
    assert occupancy(block, each + 1, bytes_shared).blocks <= one.blocks
    assert occupancy(block, each, bytes_shared + 1).blocks <= one.blocks
    assert occupancy(block + 1, each, bytes_shared).blocks <= one.blocks


@pytest.mark.parametrize("block", [(0, 32, 0), (32, 0, 0)])
def test_a_block_without_threads_or_registers_is_refused(block):
    with pytest.raises(ValueError, match="pass what ptxas says"):
        occupancy(*block)
