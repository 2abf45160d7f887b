"""What does the host do in a step, and how does it grow with residents, waiting requests and context?

    python -m benchmarks.host_time [--model FOLDER | --no-model] [--json FILE]

Times plan, execute, commit and drain of pure decode steps on a device that does nothing, so that only the host's work
is left. `growth` is the exponent of a power law fitted to the medians; context is varied at one number of residents.
With a model, the time of the host at 8 residents is also given as a share of the model's decode step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxengine as je
from benchmarks import report
from benchmarks.null_device import null_model

BLOCK_SIZE = 16
ROOM = 4096
"""Tokens that a session may grow by while it is measured."""


def residents(count: int, context: int, waiting: int = 0) -> tuple[je.Model, je.EngineState]:
    """A state of `count` requests that decode behind `context` tokens each, and `waiting` that find no place."""
    blocks = -(-(context + ROOM) // BLOCK_SIZE)
    model = null_model(blocks * BLOCK_SIZE)
    config = je.EngineConfig(
        max_batch_size=count,
        max_scheduled_tokens=max(count * context, count),
        num_blocks=count * blocks,
        block_size=BLOCK_SIZE,
    )
    state = je.init_state(model, config)
    prompt = np.zeros(context, np.int32)
    for n in range(count + waiting):
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt if n < count else [0])
    state, events = je.step(model, state)
    assert len(events) == count, "the prompts don't run in one step"
    return model, je.drain(state, count)[0]


def measure_steps(model: je.Model, state: je.EngineState, steps: int) -> dict[str, float]:
    """Median seconds of each part of a step, and of their sum."""
    parts: dict[str, list[float]] = {name: [] for name in ("plan", "execute", "commit", "drain", "step")}
    for _ in range(steps):
        marks = [time.perf_counter()]
        plan = je.plan_step(state)
        marks.append(time.perf_counter())
        transaction = je.execute(model, state, plan)
        marks.append(time.perf_counter())
        state, events = je.commit(state, transaction)
        marks.append(time.perf_counter())
        state, _ = je.drain(state, len(events))
        marks.append(time.perf_counter())
        for name, begin, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append(end - begin)
        parts["step"].append(marks[-1] - marks[0])
    return {name: statistics.median(times) for name, times in parts.items()}


def growth(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent e of seconds = c * sizes ** e, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def model_step(folder: Path | None, steps: int) -> float:
    """Median seconds of a whole decode step of a model at 8 rows."""
    from jaxengine.demo import demo_model_folder

    model = je.load_model(demo_model_folder(progress=True) if folder is None else folder)
    tokens = (np.arange(64) % model.decoder.vocab_size).tolist()
    state = je.init_state(model, je.EngineConfig(max_batch_size=8, num_blocks=8 * 64, block_size=BLOCK_SIZE))
    for n in range(8):
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, tokens[n:])
    times = []
    while len(times) < steps + 3:
        begin = time.perf_counter()
        state, events = je.step(model, state)
        times.append(time.perf_counter() - begin)
        state, _ = je.drain(state, len(events))
    return statistics.median(times[3:])


def measure(arguments: argparse.Namespace) -> None:
    cases = [("residents", n, arguments.context, 0) for n in arguments.residents]
    cases += [("context", arguments.at, n, 0) for n in arguments.contexts]
    cases += [("waiting", arguments.at, arguments.context, n) for n in arguments.waiting]
    rows: list[dict[str, Any]] = []
    for varied, count, context, waiting in cases:
        model, state = residents(count, context, waiting)
        seconds = measure_steps(model, state, arguments.steps)
        rows.append(
            {"varied": varied, "residents": count, "context": context, "waiting": waiting, "seconds": seconds}
        )
    found: dict[str, float] = {}
    for varied in ("residents", "context", "waiting"):
        mine = [row for row in rows if row["varied"] == varied]
        if len(mine) > 1:
            found[varied] = growth([row[varied] for row in mine], [row["seconds"]["step"] for row in mine])
    share = None
    if not arguments.no_model:
        model, state = residents(8, 64)
        host = measure_steps(model, state, arguments.steps)["step"]
        share = host / model_step(arguments.model, arguments.steps)
    record = {
        "benchmark": "host_time",
        "machine": report.machine_facts(),
        "settings": {"steps": arguments.steps, "block_size": BLOCK_SIZE},
        "rows": rows,
        "growth": found,
        "share_of_model_step": share,
    }
    header = ("varied", "residents", "context", "waiting", "plan ms", "execute", "commit", "drain", "step ms")
    cells = [
        (
            row["varied"],
            *(str(row[name]) for name in ("residents", "context", "waiting")),
            *(f"{1e3 * seconds:.3f}" for seconds in row["seconds"].values()),
        )
        for row in rows
    ]
    lines = [f"growth with {name}: exponent {value:.2f}" for name, value in found.items()]
    if share is not None:
        lines.append(f"share of the model's decode step at 8 rows: {share:.1%}")
    report.conclude(record, "\n".join([report.table(header, cells), "", *lines]), arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = report.at_least(1)
    lists = {
        "residents": ([16, 64, 256, 1024, 4096], "numbers of residents to compare"),
        "contexts": ([1024, 8192, 131072 - ROOM], "context lengths to compare"),
        "waiting": ([10, 100, 1000, 10000], "numbers of waiting requests to compare"),
    }
    for name, (default, meaning) in lists.items():
        parser.add_argument(f"--{name}", type=count, nargs="+", default=default, metavar="N", help=meaning)
    parser.add_argument("--context", type=count, default=256, metavar="N", help="context of the others")
    parser.add_argument("--at", type=count, default=64, metavar="N", help="residents of the others")
    parser.add_argument("--steps", type=count, default=50, metavar="N", help="measured steps of each case")
    parser.add_argument(
        "--model",
        type=report.existing_folder,
        metavar="FOLDER",
        help="compare with it; default: the demo model",
    )
    parser.add_argument("--no-model", action="store_true", help="compare with no model")
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
