"""Reading PTX, machine code and schedules: kinds of instructions, loops and order, on texts written by hand."""

import pytest

from tests.hopper.instructions import LOADS, MATH, Kind, count_ptx, count_sass, ptx_names, share
from tests.hopper.loops import innermost_loops, parse
from tests.hopper.schedule import Scheduled, schedule

PTX = """
.version 9.0
.visible .entry kernel(.param .b64 kernel_param_0)
.maxntid 128, 1, 1
{
    .reg .pred %p<3>;
$L__BB0_1:
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x; // cp.async.bulk in a comment
    ld.global.f32 %f1, [%rd1];
    ld.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];
    ld.shared::cta.b32 %r5, [%r6];
    @%p1 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd6, {%r8}], [%r3];
    { .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r4}, %rd1, %rd2, p; }
    wgmma.commit_group.sync.aligned;
    LAB_WAIT: mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2; @p bra DONE; bra LAB_WAIT; DONE:
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
    fma.rn.f32 %f2, %f1, %f1, %f1;
    mov.f32 %f3, %f2;
    setp.gt.f32 %p2, %f1, %f2;
    add.s64 %rd7, %rd6, 128;
    st.local.b32 [%rd1], %r1;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};
    st.global.b32 [%rd1], %r1;
    cp.async.bulk.commit_group;
    @!%p2 bra $L__BB0_1;
    ret;
}
"""


def test_each_ptx_instruction_counts_once_under_its_kind():
    assert dict(count_ptx(PTX)) == {
        Kind.BULK_COPY: 1,
        Kind.WGMMA: 1,
        Kind.MMA: 1,
        Kind.GLOBAL_LOAD: 2,
        Kind.GLOBAL_STORE: 1,
        Kind.SHARED_LOAD: 1,
        Kind.SHARED_STORE: 1,
        Kind.LOCAL_STORE: 1,
        Kind.FLOAT: 2,
        Kind.SYNC: 3,
        Kind.CONTROL: 4,
        Kind.OTHER: 5,
    }
    assert len(ptx_names(PTX)) == 23


def test_machine_instructions_count_under_their_kind():
    names = "UTMALDG.4D HGMMA.64x64x16.F32 HMMA.16816.F32 LDG.E LDSM.16.M88.4 STL.64 FFMA BRA IADD3".split()
    counts = count_sass(names)
    assert {kind: count for kind, count in counts.items() if count != 1} == {}
    assert share(counts, LOADS) == 3 / 9
    assert share(counts, MATH) == 3 / 9
    assert share({}, MATH) == 0


def sass(*lines: str) -> str:
    return "\n".join(line if line.startswith(".") else f"        /*0000*/    {line} ;" for line in lines)


NESTED = sass(
    "MOV R0, R1",
    ".L_x_0:",  # outer loop, with a matrix product of its own
    "HGMMA.64x64x16.F32 R2",
    ".L_x_1:",  # inner loop
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1]",
    "@!P0 BRA `(.L_x_3)",  # waits at the end of the kernel, and comes back
    ".L_x_2:",
    "HGMMA.64x64x16.F32 R4",
    "@P1 BRA `(.L_x_1)",
    "@P2 BRA `(.L_x_0)",
    "FADD R1, R1, R2",
    "EXIT",
    ".L_x_3:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1]",
    "@!P0 BRA `(.L_x_3)",
    "BRA `(.L_x_2)",
    ".L_x_4:",  # what pads the end jumps to itself
    "BRA `(.L_x_4)",
)


def test_a_loop_is_found_with_the_wait_that_lies_outside_of_it_in_the_text():
    (inner,) = innermost_loops(parse(NESTED), Kind.WGMMA)
    assert inner == (
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "BRA",
        "HGMMA.64x64x16.F32",
        "BRA",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "BRA",
        "BRA",
    )


def test_a_kernel_without_such_a_loop_has_none():
    assert innermost_loops(parse(NESTED), Kind.MMA) == []
    assert innermost_loops(parse(sass("HGMMA.64x64x16.F32 R2", "EXIT")), Kind.WGMMA) == []
    assert innermost_loops(parse(""), Kind.WGMMA) == []


def test_two_loops_beside_each_other_are_two():
    text = sass(
        ".L_x_0:", "HGMMA R0", "@P0 BRA `(.L_x_0)", ".L_x_1:", "HGMMA R0", "BRA.U UP0, `(.L_x_1)", "EXIT"
    )
    assert innermost_loops(parse(text), Kind.WGMMA) == [("HGMMA", "BRA"), ("HGMMA", "BRA.U")]


HLO = """HloModule jit_f, is_scheduled=true

%inner (p: f32[2]) -> f32[2] {
  ROOT %p = f32[2]{0} parameter(0)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0:S(5)} parameter(0), sharding={replicated}
  %copy-start.1 = (f32[2]{0}, f32[2]{0:S(5)}, u32[]) copy-start(%a), metadata={op_name="f(x)"}
  %copy-done.1 = f32[2]{0} copy-done(%copy-start.1)
  ROOT %fusion.2 = f32[2]{0} fusion(%copy-done.1, %a), kind=kLoop, calls=%inner
}
"""


def test_a_schedule_is_the_order_of_the_entry_computation():
    assert schedule(HLO) == (
        Scheduled("a", "parameter", ()),
        Scheduled("copy-start.1", "copy-start", ("a",)),
        Scheduled("copy-done.1", "copy-done", ("copy-start.1",)),
        Scheduled("fusion.2", "fusion", ("copy-done.1", "a")),
    )


def test_text_that_is_not_scheduled_is_refused():
    with pytest.raises(ValueError, match="pass the text of a compiled program"):
        schedule(HLO.replace("is_scheduled=true", ""))
