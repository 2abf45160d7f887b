"""How many steps do drafts from a request's own text save, and how much time?

    python -m benchmarks.speculation [--folder FOLDER] [--batch N ...] [--json FILE]

The prompt is a passage repeated, so that text goes on as it went before. The same prompts are decoded greedily without
a proposer and with `NgramDrafts`, in alternation. `ratio` is the median over turns of the time with drafts to that
without them in the turn beside it, `steps` and `without` count steps; the tokens are compared and have to be the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxengine as je
from benchmarks import report
from benchmarks.timed_turns import add_turn_arguments, engine_for, in_alternation
from benchmarks.turns import BenchmarkError

PASSAGE = Path(__file__).with_name("data") / "prose.txt"


def measure(arguments: argparse.Namespace) -> None:
    machine = report.machine_facts()
    if arguments.folder is None:
        from jaxengine.demo import demo_model_folder

        arguments.folder = demo_model_folder(progress=True)
    model = je.load_model(arguments.folder, weights=arguments.weights)
    if model.tokenizer is None:
        raise BenchmarkError(f"{arguments.folder} has no tokenizer; give another folder")
    passage = model.tokenizer.encode(PASSAGE.read_text()[:4000])[: arguments.passage_tokens]
    prompt = passage * arguments.repeats
    sampling = je.SamplingParams(temperature=0.0, ignore_eos=True)
    kinds = {
        "plain": je.RequestOptions(sampling=sampling),
        "drafted": je.RequestOptions(sampling=sampling, proposer=je.NgramDrafts(most=arguments.drafts)),
    }
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch:
        prompts = [prompt] * batch
        with engine_for(model, prompts, arguments.new_tokens) as engine:
            turns = in_alternation(engine, kinds, prompts, arguments.new_tokens, arguments.turns)
        if any(turn["tokens"] != turns["plain"][0]["tokens"] for those in turns.values() for turn in those):
            raise BenchmarkError("drafts changed the tokens, so the times compare different work")
        plain, drafted = ([turn["seconds"] for turn in turns[kind]] for kind in ("plain", "drafted"))
        first = turns["drafted"][0]
        rows.append(
            {
                "batch": batch,
                "seconds": statistics.median(drafted),
                "plain_seconds": statistics.median(plain),
                "ratio": statistics.median(ours / other for ours, other in zip(drafted, plain, strict=True)),
                "steps": first["steps"],
                "plain_steps": turns["plain"][0]["steps"],
                "drafted": first["drafted"],
                "accepted": first["accepted"],
                "turns": {"plain": plain, "drafted": drafted},
            }
        )
    settings = {name: getattr(arguments, name) for name in ("weights", "new_tokens", "turns", "drafts")}
    settings |= {"folder": arguments.folder.name, "prompt_tokens": len(prompt)}
    record = {"benchmark": "speculation", "machine": machine, "settings": settings, "rows": rows}
    header = ("batch", "seconds", "without", "ratio", "steps", "without", "drafted", "accepted")
    cells = [
        (
            str(row["batch"]),
            f"{row['seconds']:.3f}",
            f"{row['plain_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            *(str(row[name]) for name in ("steps", "plain_steps", "drafted", "accepted")),
        )
        for row in rows
    ]
    report.conclude(record, report.table(header, cells), arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = report.at_least(1)
    parser.add_argument(
        "--passage-tokens", type=number, default=48, metavar="N", help="tokens of the passage"
    )
    parser.add_argument("--repeats", type=number, default=3, metavar="N", help="passages in the prompt")
    parser.add_argument("--drafts", type=number, default=8, metavar="N", help="most drafts a step")
    add_turn_arguments(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
