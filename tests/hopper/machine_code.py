"""Machine code of a PTX text, what ptxas says of it, and its disassembly.

The tools are those of the wheels nvidia-cuda-nvcc and nvidia-cuda-nvdisasm, so that figures don't depend on what else
a machine has installed; without the wheels, those on PATH. The ptxas of CUDA 12 refuses the PTX that Mosaic GPU emits
where it has seen CUDA 13.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ARCHITECTURE = "sm_90a"


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """What ptxas reports of one kernel, in registers a thread and bytes; `warnings` are its other remarks.

    Mosaic GPU's shared memory isn't in `shared_bytes`, since it's asked for at the launch. A kernel that moves
    registers between warps (setmaxnreg) has more than `registers` in some of them.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]
    sass: str

    @property
    def serialised_wgmma(self) -> bool:
        """Whether ptxas had to make tensor core instructions wait for one another."""
        return any("wgmma" in warning and "serialized" in warning for warning in self.warnings)


@functools.cache
def tool(name: str) -> Path:
    """Path of ptxas or nvdisasm; raises FileNotFoundError that names the wheel."""
    wheel = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    folders = [str(folder) for folder in _wheel_folders()]
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    if found is None:
        raise FileNotFoundError(f"{name} isn't installed; pip install {wheel}")
    return Path(found)


def assemble(ptx: str) -> MachineCode:
    """Assembles one kernel for Hopper; raises ValueError with what ptxas says if it refuses the text."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        answer = _run("ptxas", "-v", f"-arch={ARCHITECTURE}", "-o", binary, source)
        return _read(answer.stderr + answer.stdout, _run("nvdisasm", "-c", binary).stdout)


def _read(report: str, sass: str) -> MachineCode:
    remarks = re.findall(r"^ptxas (?:warning ?: |info +: \(C\d+\) )(.*)$", report, re.MULTILINE)
    return MachineCode(
        registers=_number(r"Used (\d+) registers", report),
        stack_bytes=_number(r"(\d+) bytes stack frame", report),
        spill_store_bytes=_number(r"(\d+) bytes spill stores, \d+ bytes spill loads$", report),
        spill_load_bytes=_number(r"\d+ bytes spill stores, (\d+) bytes spill loads$", report),
        shared_bytes=_number(r"(\d+) bytes smem", report, default=0),
        warnings=tuple(remarks),
        sass=sass,
    )


def _number(pattern: str, report: str, default: int | None = None) -> int:
    found = re.findall(pattern, report, re.MULTILINE)
    if len(found) == 1:
        return int(found[0])
    if not found and default is not None:
        return default
    raise ValueError(
        f"ptxas reports of {len(found)} kernels by {pattern!r}, not of one; pass one kernel: {report}"
    )


def _run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ValueError(f"{tool(name)} refuses its input: {answer.stderr.strip()[:2000]}")
    return answer


def _wheel_folders() -> list[Path]:
    """Where CUDA 13's wheels keep their programs."""
    nvidia = importlib.util.find_spec("nvidia")
    roots = nvidia.submodule_search_locations if nvidia is not None else None
    return [Path(root, "cu13", "bin") for root in roots or ()]
