"""The publication kernel compiled for Hopper: in place, few launches, no spills."""

import dataclasses

import pytest

from tests.hopper.compiling import compile_for_hopper
from tests.hopper.instructions import Kind
from tests.hopper.publication_cases import CASES

pytestmark = pytest.mark.hopper


@pytest.mark.parametrize("name", CASES)
def test_R3_R4_pages_are_written_in_place_by_one_kernel_without_spills(name):
    case = CASES[name]
    program = compile_for_hopper(case.function, *case.shapes, donate_argnums=case.donated)
    (kernel,) = program.kernels
    assert program.aliased_bytes == case.pool_bytes
    assert program.temporary_bytes < 4096
    assert " copy(" not in program.hlo
    assert kernel.machine.spill_store_bytes == kernel.machine.spill_load_bytes == 0
    assert kernel.sass_counts[Kind.BULK_COPY] >= 2


def test_R3_the_check_sees_a_copied_pool():
    case = dataclasses.replace(CASES["bfloat16"], layers=2)
    program = compile_for_hopper(case.function, *case.shapes)
    assert program.aliased_bytes == 0
    assert " copy(" in program.hlo or program.hlo.count("copy-start") > 0
