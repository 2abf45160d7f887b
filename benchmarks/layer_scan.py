"""Does rolling a decoder's repeated layers into one `lax.scan` pay?

    python -m benchmarks.layer_scan [--layers 4 16 32 64] [--json FILE]

Three forms of one forward program, on llamas made of the committed fixture (`benchmarks/repeated_layers.py`):

- `unrolled`: what the engine compiles, with an array of pages a layer;
- `scan over pages`: a scan whose operands are the stacked weights and the stacked pages of the layers;
- `scan, one pool`: a scan over the stacked weights; the pages of all layers are one pool, which no layer cuts: each
  adds its place in the pool to the numbers of the block table.

A scan's new keys and values stay stacked, the better case for it: committing them is not measured. Each form lives in a
process of its own; in each turn it traces and compiles the program anew and runs some steps.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.repeated_layers import write_folder
from benchmarks.scanned_layers import Operands, forward_scanned, roll
from benchmarks.turns import Contender, Work, started, take_turns
from jaxengine.fixed_state import StateRows
from jaxengine.kernels import DECODE_TILE, PREFILL_TILE
from jaxengine.programs import Bucket, Programs, StepBatch
from onnx_import import Decoder, import_decoder, read_folder
from pallas_kernels import KEY_TILE, make_query_tiles, max_query_tiles

UNROLLED, OVER_PAGES, ONE_POOL = FORMS = ("unrolled", "scan over pages", "scan, one pool")
ROWS, CONTEXT, BLOCK_SIZE, COLUMNS = 8, 240, 16, 32
NUM_BLOCKS = ROWS * COLUMNS + 1
"""A prime: an array is made of whole layers' pages exactly when its size is a multiple of it."""
STEPS = {
    "decode": Bucket(ROWS, ROWS, ROWS, DECODE_TILE, ROWS),
    "mixed": Bucket(256, ROWS, ROWS, PREFILL_TILE, max_query_tiles(256, ROWS, PREFILL_TILE)),
}
"""The buckets that the engine takes for 8 rows at most."""
FREE = frozenset(("parameter", "get-tuple-element", "bitcast", "tuple", "while"))
"""Instructions that make no array of their own."""


def step_batch(bucket: Bucket, vocab_size: int) -> StepBatch:
    """Rows that decode behind CONTEXT tokens each; in a larger bucket the last one is a prompt that fills it."""
    count = np.ones(ROWS, np.int32)
    past = np.full(ROWS, CONTEXT, np.int32)
    if bucket.tokens > ROWS:
        count[-1], past[-1] = bucket.tokens - ROWS + 1, 0
    ends = np.cumsum(count, dtype=np.int32)
    start = ends - count
    row = np.repeat(np.arange(ROWS, dtype=np.int32), count)
    whole = np.zeros(ROWS, np.int32)
    return StepBatch(
        tokens=np.random.default_rng(0).integers(vocab_size, size=bucket.tokens, dtype=np.int32),
        positions=(past - start)[row] + np.arange(bucket.tokens, dtype=np.int32),
        limits=np.full(bucket.tokens, COLUMNS * BLOCK_SIZE, np.int32),
        logits_rows=ends - 1,
        tiles=make_query_tiles(
            np.arange(ROWS),
            past,
            count,
            tile_size=bucket.tile_size,
            key_tile=KEY_TILE,
            padded_tiles=bucket.tiles,
            padded_tokens=bucket.tokens,
        ),
        states=StateRows(start, count, whole, past > 0, row),
    )


class Clock:
    """Wall and processor time between laps; the second one says more on a busy machine."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Seconds of both since the last lap."""
        now = time.perf_counter(), time.process_time()
        wall, cpu = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return wall, cpu


def make_form(form: str, folder: str) -> Work:
    """Loads a model; a task compiles the program of a step in this form and runs it."""
    decoder = import_decoder(read_folder(folder))
    prepare = _unrolled if form == UNROLLED else functools.partial(_scanned, one_pool=form == ONE_POOL)
    program, arguments = prepare(decoder, *_past(decoder))
    jax.block_until_ready(arguments)

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        bucket = STEPS[task["step"]]
        batch = step_batch(bucket, decoder.vocab_size)
        # Nothing may be left of the turn before, of which JAX keeps the traces of its own functions.
        jax.clear_caches()
        clock = Clock()
        lowered = program().trace(*arguments, batch, tile_size=bucket.tile_size).lower()
        trace = clock.lap()
        compiled = lowered.compile()
        compiling = clock.lap()
        result = jax.block_until_ready(compiled(*arguments, batch))
        steps = []
        for _ in range(task["runs"]):
            clock.lap()
            jax.block_until_ready(compiled(*arguments, batch))
            steps.append(clock.lap())
        step = statistics.median(wall for wall, _ in steps), statistics.median(cpu for _, cpu in steps)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return {
            "trace_seconds": trace[0],
            "compile_seconds": compiling[0],
            "build_cpu_seconds": trace[1] + compiling[1],
            "step_seconds": step[0],
            "step_cpu_seconds": step[1],
            "temporary_bytes": analysis.temp_size_in_bytes,
            "pages_made": pages_made(compiled.as_text()),
            "logits": np.asarray(result.logits),
        }

    return work


def _past(decoder: Decoder) -> tuple[list[jax.Array], jax.Array]:
    """Pages of random numbers for each layer, and a block table that gives every row blocks from all over."""
    random = np.random.default_rng(0)
    pages = [
        jnp.asarray(
            random.standard_normal((NUM_BLOCKS, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim), np.float32)
        )
        for spec in decoder.layers
    ]
    return pages, jnp.asarray(random.permutation(ROWS * COLUMNS).astype(np.int32).reshape(ROWS, COLUMNS))


Prepared = tuple[Callable[[], Any], tuple[Any, ...]]
"""What makes a jitted program, each time a new one, and the arguments in front of the batch."""


def _unrolled(decoder: Decoder, pages: list[jax.Array], block_table: jax.Array) -> Prepared:
    return lambda: Programs(decoder).forward, (decoder.params, tuple(pages), block_table, ())


def _scanned(decoder: Decoder, pages: list[jax.Array], block_table: jax.Array, *, one_pool: bool) -> Prepared:
    rolled = roll(decoder.plan)
    stacked = {
        key: jax.tree.map(lambda *layers: jnp.stack(layers), *(decoder.params[key] for key in keys))
        for key, keys in rolled.keys.items()
    }
    taken = {key for keys in rolled.keys.values() for key in keys}
    params = {key: weight for key, weight in decoder.params.items() if key not in taken}
    pool = (jnp.concatenate(pages),) if one_pool else (pages[0], jnp.stack(pages[1:]))
    program = functools.partial(forward_scanned, decoder.plan, rolled)
    return lambda: jax.jit(program, static_argnames="tile_size"), (
        Operands(params, stacked, pool, block_table),
    )


def pages_made(module: str) -> int:
    """How many instructions of a compiled module make an array of the size of a layer's pages, or of several."""
    fused = set(re.findall(r"calls=(%[\w.-]+)", module))
    found = 0
    for computation in module.split("\n\n"):
        if computation.split(" ", 1)[0] in fused:
            continue
        for sizes, kind in re.findall(r" = \w+\[([\d,]+)\]\S* ([\w-]+)\(", computation):
            made = int(np.prod([int(size) for size in sizes.split(",")], dtype=np.int64))
            found += made % NUM_BLOCKS == 0 and kind not in FREE
    return found


def measure(arguments: argparse.Namespace) -> None:
    machine = report.machine_facts()
    rows: list[dict[str, Any]] = []
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), layers, arguments.widen)
            with started([Contender(form, make_form, (form, folder)) for form in FORMS]) as processes:
                for step in STEPS:
                    task = {"step": step, "runs": arguments.runs}
                    rows += compared(layers, step, take_turns(processes, task, arguments.turns))
    record = {
        "benchmark": "layer_scan",
        "machine": machine,
        "settings": {
            "rows": ROWS,
            "context": CONTEXT,
            **{name: getattr(arguments, name) for name in ("widen", "turns", "runs")},
        },
        "rows": rows,
    }
    header = (
        "form",
        "layers",
        "step",
        "trace s",
        "compile s",
        "ratio",
        "cpu ratio",
        "step ms",
        "ratio",
        "cpu ratio",
        "temporary MiB",
        "pages made",
        "difference",
    )
    cells = [
        (
            row["form"],
            str(row["layers"]),
            row["step"],
            f"{row['trace_seconds']:.2f}",
            f"{row['compile_seconds']:.2f}",
            f"{row['build_ratio']:.2f}",
            f"{row['build_cpu_ratio']:.2f}",
            f"{1e3 * row['step_seconds']:.2f}",
            f"{row['step_ratio']:.2f}",
            f"{row['step_cpu_ratio']:.2f}",
            f"{row['temporary_bytes'] / 2**20:.2f}",
            str(row["pages_made"]),
            "none" if row["same_bits"] else f"{row['largest_difference']:.2g}",
        )
        for row in rows
    ]
    title = (
        f"{ROWS} rows, medians of {arguments.turns} turns; ratios are relative to the unrolled form, "
        "the first one for trace and compile together"
    )
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def compared(layers: int, step: str, found: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each form: medians over turns, and of the ratios to the unrolled form's figure beside it."""
    rows = []
    logits = {form: turns[-1]["logits"] for form, turns in found.items()}
    figures = [
        {
            form: {name: value for name, value in turns[n].items() if name != "logits"}
            | {"build_seconds": turns[n]["trace_seconds"] + turns[n]["compile_seconds"]}
            for form, turns in found.items()
        }
        for n in range(len(found[UNROLLED]))
    ]
    for form in FORMS:
        turns = [turn[form] for turn in figures]
        row: dict[str, Any] = {"layers": layers, "step": step, "form": form}
        for name in ("trace", "compile", "step"):
            row[f"{name}_seconds"] = statistics.median(turn[f"{name}_seconds"] for turn in turns)
        for name in ("build", "build_cpu", "step", "step_cpu"):
            of = f"{name}_seconds"
            row[f"{name}_ratio"] = statistics.median(turn[form][of] / turn[UNROLLED][of] for turn in figures)
        row |= {name: turns[-1][name] for name in ("temporary_bytes", "pages_made")}
        row["same_bits"] = logits[form].tobytes() == logits[UNROLLED].tobytes()
        row["largest_difference"] = float(np.abs(logits[form] - logits[UNROLLED]).max())
        rows.append(row | {"turns": turns})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="layer_scan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    depths = [4, 16, 32, 64]
    parser.add_argument(
        "--layers", type=report.at_least(2), nargs="+", default=depths, metavar="N", help="depths to compare"
    )
    sizes = {
        "widen": (4, "times the fixture's hidden size of 96"),
        "turns": (5, "measured turns of each form"),
        "runs": (5, "steps of a turn"),
    }
    for name, (default, meaning) in sizes.items():
        parser.add_argument(f"--{name}", type=report.at_least(1), default=default, metavar="N", help=meaning)
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
