"""What kind of work an instruction does, from its name in PTX or in machine code (SASS).

PTX names: the PTX ISA document. Machine code names: the instruction set reference in the documentation of CUDA's
binary utilities, Hopper's table; a name's modifiers follow its first dot.
"""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Iterable, Mapping


class Kind(enum.StrEnum):
    """Kinds of work. Spills are local loads and stores; a bulk copy is what the tensor memory accelerator does."""

    BULK_COPY = "bulk copy"
    ASYNC_COPY = "async copy"
    WGMMA = "wgmma"
    MMA = "mma"
    GLOBAL_LOAD = "global load"
    GLOBAL_STORE = "global store"
    SHARED_LOAD = "shared load"
    SHARED_STORE = "shared store"
    LOCAL_LOAD = "local load"
    LOCAL_STORE = "local store"
    FLOAT = "float"
    SYNC = "sync"
    CONTROL = "control"
    OTHER = "other"


Counts = Mapping[Kind, int]
"""Instructions of each kind in a text, each counted once however often it runs; absent kinds count 0."""

LOADS = (Kind.BULK_COPY, Kind.ASYNC_COPY, Kind.GLOBAL_LOAD, Kind.SHARED_LOAD, Kind.LOCAL_LOAD)
MATH = (Kind.WGMMA, Kind.MMA, Kind.FLOAT)

_SASS = {
    Kind.BULK_COPY: "UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED",
    Kind.ASYNC_COPY: "LDGSTS",
    Kind.WGMMA: "HGMMA IGMMA QGMMA BGMMA",
    Kind.MMA: "HMMA IMMA BMMA DMMA QMMA",
    Kind.GLOBAL_LOAD: "LDG LD",
    Kind.GLOBAL_STORE: "STG ST RED REDG ATOM ATOMG",
    Kind.SHARED_LOAD: "LDS LDSM",
    Kind.SHARED_STORE: "STS STSM STAS ATOMS",
    Kind.LOCAL_LOAD: "LDL",
    Kind.LOCAL_STORE: "STL",
    Kind.FLOAT: (
        "FADD FMUL FFMA FMNMX FSEL FSET FSETP FCHK FSWZADD MUFU F2F F2FP F2I F2IP I2F I2FP FRND "
        "HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HSETP2 DADD DMUL DFMA DSETP"
    ),
    Kind.SYNC: (
        "BAR SYNCS WARPGROUP WARPGROUPSET WARPSYNC DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR CCTL CCTLL NANOSLEEP "
        "UTMACMDFLUSH ELECT ACQBULK ARRIVES UCGABAR_ARV UCGABAR_WAIT USETMAXREG BSSY BSYNC BMOV"
    ),
    Kind.CONTROL: "BRA BRX JMP JMX CALL RET EXIT BREAK NOP YIELD BPT KILL",
}
_KIND_OF_SASS = {name: kind for kind, names in _SASS.items() for name in names.split()}

_PTX = (
    (
        Kind.SYNC,
        r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)|wgmma\.(fence|commit|wait)",
    ),
    (Kind.OTHER, r"cp\.async\.bulk\.prefetch"),
    (Kind.BULK_COPY, r"cp(\.reduce)?\.async\.bulk"),
    (Kind.ASYNC_COPY, r"cp\.async"),
    (Kind.WGMMA, r"wgmma\.mma_async"),
    (Kind.MMA, r"w?mma\."),
    (Kind.OTHER, r"ld(u)?\.(param|const)|st\.param"),
    (Kind.SHARED_LOAD, r"ldmatrix|ld(\.\w+)*\.shared"),
    (Kind.SHARED_STORE, r"stmatrix|(st|red|atom)(\.\w+)*\.shared"),
    (Kind.LOCAL_LOAD, r"ld(\.\w+)*\.local"),
    (Kind.LOCAL_STORE, r"st(\.\w+)*\.local"),
    (Kind.GLOBAL_LOAD, r"ldu?\."),
    (Kind.GLOBAL_STORE, r"(st|red|atom)\."),
    (Kind.SYNC, r"bar|mbarrier|membar|fence|elect|setmaxnreg|nanosleep"),
    (Kind.CONTROL, r"bra|brx|ret|exit|call|trap"),
    (Kind.OTHER, r"mov|ld|st|prefetch|shfl"),
    (Kind.FLOAT, r"\w+[\w.]*\.(f16|f16x2|bf16|bf16x2|f32|f64|tf32)\b"),
)
_KIND_OF_PTX = tuple((kind, re.compile(pattern)) for kind, pattern in _PTX)


def kind_of_sass(name: str) -> Kind:
    """The kind of a machine instruction, by its name with or without modifiers."""
    return _KIND_OF_SASS.get(name.partition(".")[0], Kind.OTHER)


def kind_of_ptx(name: str) -> Kind:
    """The kind of a PTX instruction, by its name with modifiers."""
    return next((kind for kind, pattern in _KIND_OF_PTX if pattern.match(name)), Kind.OTHER)


def count_sass(names: Iterable[str]) -> Counts:
    """How many of the machine instructions are of each kind."""
    return collections.Counter(map(kind_of_sass, names))


def count_ptx(ptx: str) -> Counts:
    """How many instructions of each kind a PTX text holds, those of inline assembly included."""
    return collections.Counter(map(kind_of_ptx, ptx_names(ptx)))


def ptx_names(ptx: str) -> list[str]:
    """The instructions' names in order: no directives, labels, predicates or comments."""
    body = re.sub(r"//[^\n]*", "", ptx)
    statements = re.split(r"[;\n]", body)
    names = []
    for statement in statements:
        bare = re.sub(r"^[\s{}]*([$\w]+:(?!:)\s*)*(@!?%?\w+\s+)?", "", statement)
        if match := re.match(r"[a-z][\w.:]*(?=[\s;]|$)", bare):
            names.append(match[0])
    return names


def share(counts: Counts, kinds: Iterable[Kind]) -> float:
    """The part of all instructions that are of `kinds`, 0 of nothing."""
    total = sum(counts.values())
    return sum(counts.get(kind, 0) for kind in kinds) / total if total else 0.0
