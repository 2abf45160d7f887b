"""What every benchmark says beside its numbers: the machine, the versions; and how it prints and writes them."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import BenchmarkError
from jaxengine.text import TextError
from onnx_import import ImportFailure

PACKAGES = ("jaxengine", "jax", "jaxlib", "numpy", "onnxruntime", "onnxruntime-genai")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""Those that decide which matrix kernels run."""


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_facts() -> dict[str, Any]:
    """The processor, its matrix features, cores, load average, and versions of what runs on it."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "features": [feature for feature in FEATURES if feature in flags],
        "cores": cores(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns aligned; the first is text, the others numbers."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return (
            "| " + " | ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]) + " |"
        )

    return "\n".join([line(header), line(rule), *map(line, rows)])


def describe(facts: Mapping[str, Any]) -> str:
    """One line about the machine, for the top of a table."""
    features = " ".join(facts["features"]) or "no known matrix features"
    load = "" if facts["load_average"] is None else f", load {facts['load_average']:.1f}"
    return f"{facts['processor']}, {facts['cores']} cores ({features}){load}"


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` up."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return parse


def existing_folder(text: str) -> Path:
    """An argparse type: a model folder."""
    path = Path(text)
    if not (path / "genai_config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} holds no genai_config.json; give a model folder")
    return path


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written once the measuring is done."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} can't be written; give a file in a folder that exists")
    return path


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--json FILE`."""
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write machine, settings and figures here"
    )


def require_packages(*modules: str) -> None:
    """Raises BenchmarkError naming the modules that aren't installed."""
    missing = [name for name in modules if _version(name) is None]
    if missing:
        raise BenchmarkError(f"this benchmark needs {', '.join(missing)}: install it with pip")


def conclude(record: Mapping[str, Any], text: str, file: Path | None) -> None:
    """Prints `text` under a line about the machine, and writes `record` as JSON where a file was asked for."""
    print(f"{describe(record['machine'])}\n\n{text}")
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n")


def run(measure: Callable[[], None]) -> int:
    """Runs a benchmark and returns the exit status; what the caller can mend becomes one line on stderr."""
    try:
        measure()
    except (BenchmarkError, ImportFailure, TextError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
