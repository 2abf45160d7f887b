"""What does choosing the tokens of a step cost?

    python -m benchmarks.sampling_cost [--vocabularies 49152 151936] [--rows 1 64] [--folder FOLDER] [--json FILE]

Times `choose` over rows of one kind and over rows of all kinds mixed, against a draw that sorts each row's logits, as
samplers usually do. The program is compiled before; the logits are already on the device. `of a step` is the time over
that of a greedy decode step of as many rows of the model, whatever its own vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxengine as je
from benchmarks import report
from benchmarks.timed_turns import engine_for, timed_turn
from jaxengine.sampling import SamplingRows, choose

# temperature, top-k, top-p, min-p
PLAIN, TOP_K, TOP_P, BOTH = (0.8, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (0.8, 50, 0.9, 0.05)
GREEDY = (0.0, 0, 1.0, 0.0)
KINDS = {
    "greedy": [GREEDY],
    "plain": [PLAIN],
    "top-k": [TOP_K],
    "top-p": [TOP_P],
    "all filters": [BOTH],
    "mixed": [BOTH, GREEDY, PLAIN, TOP_K, TOP_P],
}


def settings_of(kind: str, count: int) -> SamplingRows:
    columns = np.array([KINDS[kind][i % len(KINDS[kind])] for i in range(count)]).T
    types = (np.float32, np.int32, np.float32, np.float32)
    numbers = np.arange(count)
    filters = [column.astype(number) for column, number in zip(columns, types, strict=True)]
    return SamplingRows(*filters, numbers.astype(np.uint32), numbers.astype(np.int32))


@jax.jit
def chosen(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    return choose(logits, rows, known_ids=logits.shape[1]).tokens


@jax.jit
def by_sorting(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """As `chosen`, but each row that isn't greedy is sorted and given a random number an id."""

    def drawn(row_logits: jax.Array, row: SamplingRows) -> jax.Array:
        order = jnp.argsort(-row_logits, stable=True)
        scaled = (row_logits[order] - row_logits[order[0]]) / row.temperature
        rank = jnp.arange(len(order))
        kept = rank < jnp.where(row.top_k == 0, len(order), row.top_k)
        weights = jnp.where(kept, jnp.exp(scaled), 0.0)
        kept &= jnp.cumsum(weights) - weights < row.top_p * weights.sum()
        kept &= weights >= row.min_p
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(row.seed), row.position), scaled.shape)
        return order[jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf))]

    def one(row: tuple[jax.Array, SamplingRows]) -> jax.Array:
        return jax.lax.cond(row[1].temperature > 0, lambda: drawn(*row), lambda: row[0].argmax())

    return jax.lax.map(one, (logits, rows))


def seconds_of(program: Callable[..., Any], arguments: tuple[Any, ...], turns: int) -> list[float]:
    jax.block_until_ready(program(*arguments))
    result = []
    for _ in range(turns):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        result.append(time.perf_counter() - begin)
    return result


def step_seconds(model: je.Model, count: int, turns: int) -> float:
    """The median over turns of a greedy decode step of `count` rows with short contexts."""
    prompts, new_tokens = [list(range(100, 116))] * count, 24
    options = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0, ignore_eos=True))
    with engine_for(model, prompts, new_tokens) as engine:
        measured = [timed_turn(engine, options, prompts, new_tokens) for _ in range(turns + 1)][1:]
    return statistics.median(turn["seconds"] / turn["steps"] for turn in measured)


def measure(arguments: argparse.Namespace) -> None:
    machine = report.machine_facts()
    if arguments.folder is None:
        from jaxengine.demo import demo_model_folder

        arguments.folder = demo_model_folder(progress=True)
    model = je.load_model(arguments.folder)
    steps = {count: step_seconds(model, count, arguments.turns) for count in arguments.rows}
    rows: list[dict[str, Any]] = []
    for vocabulary in arguments.vocabularies:
        for count in arguments.rows:
            random = np.random.default_rng(0)
            logits = jnp.asarray(3 * random.standard_normal((count, vocabulary), np.float32))
            for kind in KINDS:
                work = (logits, settings_of(kind, count))
                ours, sorting = (
                    seconds_of(program, work, arguments.turns) for program in (chosen, by_sorting)
                )
                row = {"kind": kind, "vocabulary": vocabulary, "rows": count, "turns": ours}
                row |= {"seconds": statistics.median(ours), "sorting_seconds": statistics.median(sorting)}
                row |= {"step_seconds": steps[count], "of_step": row["seconds"] / steps[count]}
                rows.append(row | {"ratio": row["seconds"] / row["sorting_seconds"]})
    record = {
        "benchmark": "sampling_cost",
        "machine": machine,
        "settings": {"folder": str(arguments.folder), "turns": arguments.turns},
        "rows": rows,
    }
    header = ("rows of kind", "vocabulary", "rows", "ms", "of a step", "ms by sorting", "ratio")
    cells = [
        (
            row["kind"],
            str(row["vocabulary"]),
            str(row["rows"]),
            f"{1e3 * row['seconds']:.2f}",
            f"{row['of_step']:.3f}",
            f"{1e3 * row['sorting_seconds']:.2f}",
            f"{row['ratio']:.3f}",
        )
        for row in rows
    ]
    title = f"a step's choice of tokens, medians of {arguments.turns} turns; normal logits, deviation 3"
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sampling_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = report.at_least(1)
    parser.add_argument(
        "--vocabularies", type=number, nargs="+", default=[49_152, 151_936], help="widths of the logits"
    )
    parser.add_argument("--rows", type=number, nargs="+", default=[1, 64], help="rows of the step")
    parser.add_argument(
        "--folder", type=report.existing_folder, metavar="FOLDER", help="the model; default: the demo model"
    )
    parser.add_argument("--turns", type=number, default=5, metavar="N", help="measured steps")
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
