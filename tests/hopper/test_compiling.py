"""Compiling for Hopper without a GPU: kernels, what ptxas says of them, donated memory and copies from the host."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.hopper import samples
from tests.hopper.compiling import compile_for_hopper, in_host_memory
from tests.hopper.instructions import MATH, Kind, share
from tests.hopper.machine_code import assemble
from tests.hopper.registry import KERNELS
from tests.hopper.report import HEADER, table
from tests.hopper.schedule import schedule

pytestmark = pytest.mark.hopper


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.fixture(scope="module")
def attention():
    program = compile_for_hopper(
        functools.partial(samples.attention, 64), *[array(1, 1024, 4, 64, dtype="float16")] * 3
    )
    (kernel,) = program.kernels
    return kernel


def test_R4_a_copy_is_one_warpgroup_with_a_bulk_copy_each_way():
    (kernel,) = compile_for_hopper(samples.copy, array(64, 64)).kernels
    assert (kernel.launch.grid, kernel.launch.threads, kernel.launch.cluster) == ((1, 1, 1), 128, None)
    assert kernel.ptx_counts[Kind.BULK_COPY] == kernel.sass_counts[Kind.BULK_COPY] == 2
    assert kernel.ptx_counts[Kind.WGMMA] == kernel.sass_counts[Kind.WGMMA] == 0
    assert 64 * 64 * 4 < kernel.shared_bytes < 64 * 64 * 4 + 1024
    assert kernel.machine.spill_store_bytes == kernel.machine.spill_load_bytes == 0
    assert kernel.machine.registers < 32
    assert kernel.occupancy.limit == "shared memory"
    assert kernel.loops() == []


def test_R4_a_program_tells_each_of_its_kernels_once_with_its_own_code():
    def three(x, y):
        return samples.copy(samples.copy(x)), samples.copy(y)

    program = compile_for_hopper(three, array(64, 64), array(32, 64))
    large, small = sorted(program.kernels, key=lambda kernel: -kernel.shared_bytes)
    assert large.shared_bytes - small.shared_bytes == 32 * 64 * 4
    assert large.ptx != small.ptx
    assert program.hlo.count("mosaic_gpu_v2") == 3


def test_R4_attention_keeps_to_its_registers_and_its_loop_is_mostly_math(attention):
    assert attention.launch.threads == 384
    assert attention.launch.grid[0] * attention.launch.grid[1] * attention.launch.grid[2] == 4 * 1024 // (
        2 * 64
    )
    assert attention.machine.spill_store_bytes == attention.machine.spill_load_bytes == 0
    assert not attention.machine.serialised_wgmma
    assert attention.machine.registers * 384 <= 65536
    assert attention.ptx_counts[Kind.WGMMA] == attention.sass_counts[Kind.WGMMA] == 2 * 64 // 16
    assert attention.sass_counts[Kind.BULK_COPY] == attention.ptx_counts[Kind.BULK_COPY] >= 4
    (loop,) = attention.loops()
    assert loop[Kind.WGMMA] == 8
    assert share(loop, MATH) > 0.5


def test_R4_tiles_too_large_for_the_registers_spill_and_make_the_tensor_cores_wait():
    shapes = [array(1, 1024, 4, 128, dtype="float16")] * 3
    (kernel,) = compile_for_hopper(functools.partial(samples.attention, 128), *shapes).kernels
    assert kernel.machine.spill_store_bytes > 0
    assert kernel.machine.serialised_wgmma
    (loop,) = kernel.loops()
    assert loop[Kind.LOCAL_LOAD] > 0


def test_ptx_that_does_not_assemble_is_refused_with_what_ptxas_says():
    with pytest.raises(ValueError, match="refuses its input: ptxas"):
        assemble(".version 8.0\n.target sm_90a\nnonsense")


@pytest.mark.parametrize("donated", [True, False])
def test_R1_a_donated_pool_is_written_in_place(donated):
    def write(pool, places, rows):
        return pool.at[places].set(rows)

    options = {"donate_argnums": 0} if donated else {}
    pool = array(1024, 64)
    program = compile_for_hopper(write, pool, array(8, dtype="int32"), array(8, 64), **options)
    assert program.aliased_bytes == (1024 * 64 * 4 if donated else 0)
    assert program.temporary_bytes == 0
    assert program.output_bytes == 1024 * 64 * 4
    assert program.kernels == ()


def test_a_copy_from_host_memory_runs_beside_a_matrix_product():
    def layer(host, weights, x):
        return x @ weights @ jax.device_put(host, jax.memory.Space.Device)

    square = array(1024, 1024)
    program = compile_for_hopper(layer, in_host_memory(square), square, square)
    order = [one for one in schedule(program.hlo) if one.opcode != "parameter"]
    first, product, done, last = order
    assert (first.opcode, done.opcode) == ("copy-start", "copy-done")
    assert done.operands == (first.name,)
    assert last.operands == (product.name, done.name)
    assert program.host_argument_bytes == 1024 * 1024 * 4


def test_R4_the_report_has_a_row_for_each_registered_kernel():
    lines = table(KERNELS[:2]).splitlines()
    assert len(lines) == 2 + 2
    assert all(line.count("|") == len(HEADER) + 1 for line in lines)
    assert lines[2].startswith("| copy | 128 |")
