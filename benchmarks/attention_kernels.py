"""How close does paged attention come to what a card can do, and how does it compare with what JAX has?

    python -m benchmarks.attention_kernels [--models llama-3-8b] [--batch 1 32] [--contexts 8192] [--json FILE]

Steps of layers shaped like those of known models, with random keys in blocks at random places, through the contenders
of `benchmarks/attention_contenders.py`. The card's rates of copying and of multiplying are measured in the same run.

- `of copies` is the live keys and values, each read once, over the time, over the rate of copying.
- `of products` is the operations of pairs that see each other, over the time, over the rate of multiplying.
- `ours / it` is the time of our kernel (of our XLA form where the kernel doesn't run) over the contender's.

A dispatch runs many calls, each with the result of the one before in its query, so that starting a program is not
what is measured; they walk over as many pools of keys as overflow the card's cache. What a contender does around its
kernel (packing, merging, gathering) counts. Contenders take turns on the same arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import plots, report
from benchmarks.attention_cases import MODELS, Case, make_inputs
from benchmarks.attention_contenders import CONTENDERS, Contender, repeated
from benchmarks.card import (
    add_card_arguments,
    card_facts,
    copy_rate,
    describe_card,
    matrix_rate,
    reason_of,
    seconds_of,
)

SLOW_SECONDS = 1.0
"""A contender whose dispatch takes longer is timed once."""
MOST_CALLS = 512
GOALS = (("decode 32 x 8192", "of_copies", 0.85), ("prefill 1 x 8192 behind 0", "of_products", 0.60))
"""Steps, the figure that matters, and what is wanted of it."""


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """The cases, those that goals name first, then a model behind the other for each size."""
    sizes = [(1, 1, new, past) for new, past in arguments.prefill]
    sizes += [(0, batch, 1, context - 1) for context in arguments.contexts for batch in arguments.batch]
    named = [(0, 32, 1, 8191), (1, 1, 8192, 0)]
    sizes.sort(key=lambda size: (size not in named, size[0]))
    shared = {"block_size": arguments.block_size, "dtype": arguments.dtype}
    return [
        Case(MODELS[model], batch, new, past, **shared)
        for _, batch, new, past in sizes
        for model in arguments.models
    ]


@contextlib.contextmanager
def refusals(reasons: dict[str, str], name: str) -> Iterator[None]:
    """Turns what a contender raises into its reason: a peer may refuse a case in any way, or lack memory for it."""
    try:
        yield
    except Exception as error:
        reasons[name] = reason_of(error)


def measure_case(
    case: Case, names: Sequence[str], rates: Mapping[str, float], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each contender: its figures, or the reason that it has none."""
    bound = max(case.live_bytes / rates["copy_rate"], case.flops / rates["matrix_rate"])
    # In prefill products bound the time, wherever keys come from.
    pools = 1 if case.new > 1 else max(-(-arguments.cache_mib * 2**20 // case.live_bytes), 1)
    calls = arguments.calls or min(max(round(arguments.dispatch_ms / 1e3 / bound), 1), MOST_CALLS)
    calls = -(-calls // pools) * pools
    reasons: dict[str, str] = {}
    chosen = {name: CONTENDERS[name] for name in names}
    for name, contender in chosen.items():
        if refusal := contender.refusal(case, pools):
            reasons[name] = refusal
    programs = compiled(case, {n: c for n, c in chosen.items() if n not in reasons}, pools, calls, reasons)
    inputs = make_inputs(case, pools)
    ready: dict[str, tuple[Any, ...]] = {}
    results: dict[str, jax.Array] = {}
    first: dict[str, float] = {}
    for name, program in programs.items():
        with refusals(reasons, name):
            operands = chosen[name].operands(case, inputs)
            ready[name] = (program, inputs.query, *jax.block_until_ready(operands))
            results[name] = program(*ready[name][1:])
            jax.block_until_ready(results[name])
            first[name] = seconds_of(functools.partial(*ready[name]))
    seconds = in_turns({name: ready[name] for name in first}, first, calls, arguments.turns, reasons)
    facts = {
        "model": case.heads.name,
        "step": str(case),
        **{name: getattr(case, name) for name in ("batch", "new", "past", "context", "live_bytes", "flops")},
        "pools": pools,
        "calls": calls,
    }
    rows = []
    ours = next((name for name in ("mosaic_gpu", "xla") if name in seconds), None)
    for name in names:
        row: dict[str, Any] = {**facts, "contender": name, "reason": reasons.get(name)}
        if name in seconds:
            row |= figures(case, seconds[name], rates) | {"turns": seconds[name]}
            if ours is not None:
                pairs = zip(seconds[ours], seconds[name], strict=False)
                row["ratio"] = statistics.median(mine / its for mine, its in pairs)
                row["compared"] = ours
                row["difference"] = float(
                    jnp.abs(results[name].astype(jnp.float32) - results[ours].astype(jnp.float32)).max()
                )
        rows.append(row)
    return rows


def in_turns(
    ready: Mapping[str, tuple[Any, ...]],
    first: Mapping[str, float],
    calls: int,
    turns: int,
    reasons: dict[str, str],
) -> dict[str, list[float]]:
    """Seconds a call of each contender by turn; slow ones keep the first, and who fails gets a reason."""
    seconds = {name: [value / calls] if value > SLOW_SECONDS else [] for name, value in first.items()}
    for _ in range(turns):
        for name, (program, *operands) in ready.items():
            if name not in reasons and first[name] <= SLOW_SECONDS:
                with refusals(reasons, name):
                    seconds[name].append(seconds_of(functools.partial(program, *operands)) / calls)
    return {name: values for name, values in seconds.items() if name not in reasons}


def figures(case: Case, seconds: Sequence[float], rates: Mapping[str, float]) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "bytes_per_second": case.live_bytes / middle,
        "flops_per_second": case.flops / middle,
        "of_copies": case.live_bytes / middle / rates["copy_rate"],
        "of_products": case.flops / middle / rates["matrix_rate"],
    }


def compiled(
    case: Case, contenders: Mapping[str, Contender], pools: int, calls: int, reasons: dict[str, str]
) -> dict[str, Any]:
    """The contenders' programs, compiled side by side; who can't be gets a reason."""
    inputs = jax.eval_shape(lambda: make_inputs(case, pools))

    def compile_one(name: str) -> Any:
        contender = contenders[name]
        shared, own = jax.eval_shape(lambda x: contender.operands(case, x), inputs)
        program = jax.jit(repeated(contender, case, pools, calls))
        return program.lower(inputs.query, shared, own).compile()

    programs: dict[str, Any] = {}
    with ThreadPoolExecutor() as workers:
        futures = {name: workers.submit(compile_one, name) for name in contenders}
        for name, future in futures.items():
            with refusals(reasons, name):
                programs[name] = future.result()
    return programs


def goals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What our kernel reached of each goal, for each model; on another device than a GPU there are none."""
    return [
        {"step": step, "model": row["model"], "figure": figure, "reached": row[figure], "wanted": wanted}
        for step, figure, wanted in GOALS
        for row in rows
        if row["contender"] == "mosaic_gpu" and figure in row and row["step"] == step
    ]


def measure(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        report.require_packages("matplotlib")
    begin = time.monotonic()
    machine, card = report.machine_facts(), card_facts()
    card["copy_rate"] = copy_rate(arguments.copy_mib, arguments.turns)
    card["matrix_rate"] = matrix_rate(arguments.matrix_size, arguments.turns)
    rows: list[dict[str, Any]] = []
    for case in cases_of(arguments):
        reason = None
        if time.monotonic() - begin > arguments.seconds:
            reason = f"not begun: {arguments.seconds} seconds were over; raise --seconds"
        elif case.pool_bytes > arguments.most_gib * 2**30:
            reason = f"its keys take {case.pool_bytes / 2**30:.0f} GiB; raise --most-gib"
        if reason is not None:
            rows.append({"model": case.heads.name, "step": str(case), "contender": "all", "reason": reason})
            continue
        print(f"{time.monotonic() - begin:5.0f} s: {case.heads.name}, {case}", file=sys.stderr, flush=True)
        reasons: dict[str, str] = {}
        with refusals(reasons, "all"):
            rows += measure_case(case, arguments.contenders, card, arguments)
        if reasons:
            rows.append({"model": case.heads.name, "step": str(case), "contender": "all"})
            rows[-1]["reason"] = reasons["all"]
    settings = {
        name: getattr(arguments, name)
        for name in ("block_size", "dtype", "cache_mib", "copy_mib", "matrix_size", "turns", "seconds")
    }
    record = {
        "benchmark": "attention_kernels",
        "machine": machine,
        "device": card,
        "settings": settings,
        "goals": goals(rows),
        "rows": rows,
    }
    report.conclude(record, f"{describe_card(card)}\n\n{tabulated(record)}", arguments.json)
    if arguments.plot is not None:
        plots.draw(record, arguments.plot)


def tabulated(record: Mapping[str, Any]) -> str:
    header = (
        "model",
        "step",
        "contender",
        "us",
        "of copies",
        "of products",
        "ours / it",
        "difference",
        "note",
    )
    cells = []
    for row in record["rows"]:
        line = [row["model"], row["step"], row["contender"]]
        if "seconds" in row:
            line += [f"{1e6 * row['seconds']:.1f}", f"{row['of_copies']:.3f}", f"{row['of_products']:.3f}"]
            line += [f"{row['ratio']:.2f}", f"{row['difference']:.2g}"] if "ratio" in row else ["", ""]
        else:
            line += [""] * 5
        cells.append((*line, row["reason"] or ""))
    reached = [
        f"{goal['model']}, {goal['step']}: {goal['reached']:.2f} of the rate of "
        f"{'copying' if goal['figure'] == 'of_copies' else 'multiplying'}, wanted {goal['wanted']:.2f}"
        for goal in record["goals"]
    ]
    return "\n\n".join([report.table(header, cells), *reached])


def new_and_past(text: str) -> tuple[int, int]:
    """An argparse type: new tokens, a colon, and committed ones."""
    new, colon, past = text.partition(":")
    if not (colon and new.isdecimal() and past.isdecimal() and int(new) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} isn't two or more new tokens, a colon and past ones")
    return int(new), int(past)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="attention_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = report.at_least(1)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS), help="shapes of heads")
    parser.add_argument(
        "--batch", type=number, nargs="+", default=[32, 1, 8, 256], metavar="N", help="rows that decode"
    )
    parser.add_argument(
        "--contexts",
        type=number,
        nargs="+",
        default=[8192, 1024, 32_768, 131_072],
        metavar="N",
        help="tokens of a row that decodes, the new one included",
    )
    parser.add_argument(
        "--prefill",
        type=new_and_past,
        nargs="*",
        default=[(8192, 0), (2048, 6144)],
        metavar="NEW:PAST",
        help="tokens of a row in prefill, and those committed before",
    )
    parser.add_argument(
        "--contenders", choices=CONTENDERS, nargs="+", default=list(CONTENDERS), help="who computes"
    )
    parser.add_argument("--block-size", type=number, default=16, metavar="N", help="slots of a block")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of queries and keys"
    )
    parser.add_argument(
        "--cache-mib",
        type=report.at_least(0),
        default=256,
        metavar="N",
        help="live keys that overflow the card's cache, which as many pools of them are made for",
    )
    parser.add_argument(
        "--most-gib", type=number, default=16, metavar="N", help="leave out cases whose keys take more"
    )
    parser.add_argument(
        "--dispatch-ms",
        type=number,
        default=10,
        metavar="N",
        help="what a dispatch takes at the card's rates",
    )
    parser.add_argument(
        "--calls", type=number, metavar="N", help="calls a dispatch, in place of --dispatch-ms"
    )
    parser.add_argument(
        "--matrix-size",
        type=number,
        default=8192,
        metavar="N",
        help="rows and columns of the measured product",
    )
    add_card_arguments(parser, seconds=200)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
