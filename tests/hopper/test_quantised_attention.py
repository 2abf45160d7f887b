"""Attention over codes of 8 bits, compiled for Hopper: it fits a core and keeps to its registers."""

import pytest

from tests.hopper.compiling import compile_for_hopper
from tests.hopper.instructions import Kind
from tests.hopper.quantised_cases import CASES

pytestmark = [pytest.mark.hopper, pytest.mark.slow]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_R1_R4_attention_over_codes_fits_a_core_and_spills_nothing(case):
    (kernel,) = compile_for_hopper(case.function, *case.shapes).kernels
    assert kernel.machine.spill_store_bytes == kernel.machine.spill_load_bytes == 0
    assert not kernel.machine.serialised_wgmma
    assert kernel.occupancy.blocks >= 1
    assert kernel.sass_counts[Kind.WGMMA] > 0
