"""What memory and time does loading a model take, against ONNX Runtime on the same file?

    python -m benchmarks.load_memory --folder FOLDER [--weights both] [--json FILE]

Each load happens in a process of its own, which has imported the library and started its device before, and has done
nothing else; the contenders take turns. Memory is the growth of the resident set, pages of the mapped file included:
at its peak while loading, and what stays. `peak / held` is that peak over the bytes of the weights as they are held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks import report
from benchmarks.memory import process_memory
from benchmarks.turns import Contender, Work, started

PEER = "ONNX Runtime"


def make_jaxengine(folder: str, weights: Literal["exact", "fast"]) -> Work:
    """Imports the library and starts the device; the task loads the folder's decoder."""
    import jax

    import jaxengine

    jax.block_until_ready(jax.numpy.zeros(1))
    resting = process_memory("VmRSS")

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        model = jaxengine.load_model(folder, weights=weights)
        seconds = time.perf_counter() - begin
        held = sum(array.nbytes for array in jax.tree.leaves(model.decoder.params))
        return {"seconds": seconds, "held_bytes": held, **_growth(resting)}

    return work


def make_peer(folder: str, file: str, threads: int) -> Work:
    """Imports ONNX Runtime; the task makes a session of the folder's file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    resting = process_memory("VmRSS")

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        session = onnxruntime.InferenceSession(
            str(Path(folder) / file), options, providers=["CPUExecutionProvider"]
        )
        seconds = time.perf_counter() - begin
        grown = _growth(resting)
        del session
        # How it holds its weights is its own affair: what stays is the best that can be said.
        return {"seconds": seconds, "held_bytes": grown["kept_bytes"], **grown}

    return work


def _growth(resting: int) -> dict[str, int]:
    return {
        "peak_bytes": process_memory("VmHWM") - resting,
        "kept_bytes": process_memory("VmRSS") - resting,
    }


def summary(name: str, turns: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the result: medians of a contender's turns, and of its time over the peer's in the turn beside it."""
    row: dict[str, Any] = {"contender": name}
    for key in ("seconds", "peak_bytes", "kept_bytes", "held_bytes"):
        row[key] = statistics.median(turn[key] for turn in turns)
    row["peak_over_held"] = max(turn["peak_bytes"] / turn["held_bytes"] for turn in turns)
    row["time_ratio"] = statistics.median(
        ours["seconds"] / theirs["seconds"] for ours, theirs in zip(turns, peer, strict=True)
    )
    return {**row, "turns": turns}


def measure(arguments: argparse.Namespace) -> None:
    report.require_packages("onnxruntime")
    folder: Path = arguments.folder
    file = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]["filename"]
    forms = ("exact", "fast") if arguments.weights == "both" else (arguments.weights,)
    contenders = [Contender(f"jaxengine {form}", make_jaxengine, (str(folder), form)) for form in forms]
    contenders.append(Contender(PEER, make_peer, (str(folder), file, report.cores())))
    machine = report.machine_facts()
    turns: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for turn in range(arguments.turns + 1):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            with started([contender]) as processes:
                measured = processes[contender.name].do({})
            if turn > 0:  # the first brings the file into memory
                turns[contender.name].append(measured)
    rows = [summary(name, measured, turns[PEER]) for name, measured in turns.items()]
    record = {
        "benchmark": "load_memory",
        "machine": machine,
        "settings": {"folder": folder.name, "turns": arguments.turns},
        "rows": rows,
    }
    header = ("contender", "held MiB", "peak MiB", "peak / held", "kept MiB", "seconds", "time ratio")
    cells = [
        (
            row["contender"],
            f"{row['held_bytes'] / 2**20:.0f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['peak_over_held']:.2f}",
            f"{row['kept_bytes'] / 2**20:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['time_ratio']:.1f}",
        )
        for row in rows
    ]
    title = f"{folder.name}, medians of {arguments.turns} turns, peak / held the largest; times relative to {PEER}"
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="load_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=report.existing_folder, required=True, help="one that both read")
    parser.add_argument(
        "--weights", choices=("exact", "fast", "both"), default="exact", help="how int4 is held"
    )
    parser.add_argument("--turns", type=report.at_least(1), default=3, metavar="N", help="of each contender")
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
