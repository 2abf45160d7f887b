"""What does a grammar cost a token, and what do its forced spans save?

    python -m benchmarks.guidance_cost [--folder FOLDER] [--batch N ...] [--json FILE]

The same prompts are decoded greedily without a grammar and under one, in alternation. `text` allows any text, so each
step pays for masks and gains nothing; `records` is a JSON array of objects, whose names and punctuation are forced.
`ratio` is the median over turns of the time a token under the grammar to that without one in the turn beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jaxengine as je
from benchmarks import report
from benchmarks.timed_turns import add_turn_arguments, engine_for, in_alternation
from benchmarks.turns import BenchmarkError

PROMPT = "Three people as JSON: "
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def grammars(new_tokens: int) -> dict[str, je.Grammar]:
    """Those to compare; neither can end within so many tokens."""
    return {
        "text": je.Grammar.regex(f"(?s:.){{{64 * new_tokens},}}"),
        "records": je.Grammar.json_schema({"type": "array", "items": RECORD, "minItems": new_tokens}),
    }


def measure(arguments: argparse.Namespace) -> None:
    machine = report.machine_facts()
    if arguments.folder is None:
        from jaxengine.demo import demo_model_folder

        arguments.folder = demo_model_folder(progress=True)
    model = je.load_model(arguments.folder, weights=arguments.weights)
    if model.tokenizer is None:
        raise BenchmarkError(f"{arguments.folder} has no tokenizer, which grammars need; give another folder")
    prompt = model.tokenizer.encode(PROMPT)
    greedy = je.SamplingParams(temperature=0.0)
    plain = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0, ignore_eos=True))
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch:
        prompts = [prompt] * batch
        for name, grammar in grammars(arguments.new_tokens).items():
            kinds = {"plain": plain, "guided": je.RequestOptions(sampling=greedy, grammar=grammar)}
            with engine_for(model, prompts, arguments.new_tokens) as engine:
                turns = in_alternation(engine, kinds, prompts, arguments.new_tokens, arguments.turns)
            each = {
                kind: [turn["seconds"] / turn["timed_tokens"] for turn in those]
                for kind, those in turns.items()
            }
            ratios = [guided / other for guided, other in zip(each["guided"], each["plain"], strict=True)]
            rows.append(
                {
                    "grammar": name,
                    "batch": batch,
                    "seconds_per_token": statistics.median(each["guided"]),
                    "plain_seconds_per_token": statistics.median(each["plain"]),
                    "ratio": statistics.median(ratios),
                    "steps": turns["guided"][0]["steps"],
                    "plain_steps": turns["plain"][0]["steps"],
                    "turns": each,
                }
            )
    settings = {"folder": arguments.folder.name, "weights": arguments.weights}
    settings |= {"new_tokens": arguments.new_tokens, "turns": arguments.turns}
    record = {"benchmark": "guidance_cost", "machine": machine, "settings": settings, "rows": rows}
    header = ("grammar", "batch", "ms a token", "without", "ratio", "steps", "without")
    cells = [
        (
            row["grammar"],
            str(row["batch"]),
            f"{1e3 * row['seconds_per_token']:.2f}",
            f"{1e3 * row['plain_seconds_per_token']:.2f}",
            f"{row['ratio']:.2f}",
            str(row["steps"]),
            str(row["plain_steps"]),
        )
        for row in rows
    ]
    report.conclude(record, report.table(header, cells), arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="guidance_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_turn_arguments(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
