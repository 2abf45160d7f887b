"""How close does a whole decode step of an 8B model come to what the card's memory allows?

    python -m benchmarks.gpu_decode [--models llama-3-8b] [--batch 1 32] [--contexts 8192] [--json FILE]

A step is what the engine runs on the device: forward, choose, publish, as programs of their own, with the chosen tokens
going into the next step. The decoder is `benchmarks/random_decoder.py`; every row has the same context, whose keys lie
in blocks at random places, and each step writes the last slot anew, so that the context stays as it is.

The bound is the bytes of the weights (but for the table of embeddings) and of the live keys and values, each read once,
over the rate at which the card copies, which is measured in the same run. `forward`, `choose` and `publish` are the
milliseconds of each program alone, `first / it` is the time of the first backend over that of the row's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import plots, report
from benchmarks.card import add_card_arguments, card_facts, copy_rate, describe_card, reason_of, seconds_of
from benchmarks.random_arrays import random_blocks, random_key
from benchmarks.random_decoder import SHAPES, RandomDecoder
from benchmarks.turns import BenchmarkError
from jaxengine.sampling import SamplingRows, choose
from onnx_import import AttentionSpec
from pallas_kernels import KEY_TILE, Backend, QueryTiles, make_query_tiles, paged_attention, publish_kv
from pallas_kernels.backends import compute_capability

WANTED = 1.25
PARTS = ("forward", "choose", "publish")
_LIMIT, _PART_RUNS = 2**20, 3


class Rows(NamedTuple):
    """Where the rows of a step are.

    Attributes:
        table: int32[rows, columns].
        positions: int32[rows], that of each row's token.
        tiles: The attention tiles.
        block: int32[rows], where the token's keys and values go.
        slot: int32[rows], in which slot of it.
    """

    table: jax.Array
    positions: jax.Array
    tiles: QueryTiles
    block: jax.Array
    slot: jax.Array


class Programs(NamedTuple):
    """The programs of a step, for one backend and number of rows."""

    forward: Any
    choose: Any
    publish: Any


def rows_of(batch: int, context: int, columns: int, num_blocks: int, size: int) -> Rows:
    """Rows of `context` tokens, the new one included; a table of `columns` whatever the context, as in the engine."""
    table = np.full((batch, columns), num_blocks, np.int32)
    used = -(-context // size)
    table[:, :used] = np.random.default_rng(0).permutation(num_blocks)[: batch * used].reshape(batch, used)
    past = np.full(batch, context - 1)
    tiles = make_query_tiles(
        np.arange(batch),
        past,
        np.ones(batch, np.int64),
        tile_size=1,
        key_tile=KEY_TILE,
        padded_tiles=batch,
        padded_tokens=batch,
    )
    block, slot = table[:, (context - 1) // size], past % size
    return jax.tree.map(jnp.asarray, Rows(table, past.astype(np.int32), tiles, block, slot.astype(np.int32)))


def step_functions(decoder: RandomDecoder, backend: Backend, batch: int) -> Programs:
    """What a step of so many rows runs, as functions."""

    # One function for all layers, so that it is traced once.
    @functools.partial(jax.jit, static_argnames="scale")
    def attend(query: Any, staged: Any, held: Any, table: Any, tiles: Any, *, scale: float) -> jax.Array:
        return paged_attention(query, staged, held, table, tiles, tile_size=1, scale=scale, backend=backend)

    def forward(params: Any, pages: Sequence[jax.Array], rows: Rows, tokens: jax.Array) -> Any:
        def attention(
            spec: AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array, sinks: None = None
        ) -> tuple[jax.Array, jax.Array]:
            staged = jnp.stack([key, value], axis=1)
            held = pages[spec.layer]
            return attend(query, staged, held, rows.table, rows.tiles, scale=spec.scale), staged

        limits = jnp.full(batch, _LIMIT, jnp.int32)
        order = jnp.arange(batch, dtype=jnp.int32)
        return decoder.apply(params, tokens, rows.positions, attention, order, None, limits)

    def chosen(logits: jax.Array, rows: Rows) -> jax.Array:
        zeros = jnp.zeros(batch, jnp.int32)
        greedy = SamplingRows(
            zeros.astype(jnp.float32),
            zeros,
            jnp.ones(batch),
            jnp.zeros(batch),
            zeros.astype(jnp.uint32),
            rows.positions,
        )
        return choose(logits, greedy, known_ids=decoder.vocab_size).tokens

    def publish(pages: Sequence[jax.Array], staged: Sequence[jax.Array], rows: Rows) -> Any:
        return publish_kv(pages, staged, rows.block, rows.slot, backend=backend)

    return Programs(forward, chosen, publish)


def compile_programs(
    decoder: RandomDecoder, backend: Backend, pages: Sequence[jax.ShapeDtypeStruct], rows: Rows
) -> Programs:
    """Compiles what a step of so many rows runs."""
    functions = step_functions(decoder, backend, len(rows.positions))
    tokens = jax.ShapeDtypeStruct(rows.positions.shape, jnp.int32)
    lowered = jax.jit(functions.forward).lower(decoder.params, pages, rows, tokens)
    logits, staged = lowered.out_info
    return Programs(
        lowered.compile(),
        jax.jit(functions.choose).lower(logits, rows).compile(),
        jax.jit(functions.publish, donate_argnums=0).lower(pages, staged, rows).compile(),
    )


class Contender:
    """A backend's steps, from tokens to tokens; all contenders pass the same pages on."""

    def __init__(self, decoder: RandomDecoder, programs: Programs, rows: Rows) -> None:
        self._params, self._programs, self._rows = decoder.params, programs, rows

    def steps(self, count: int, pages: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        """Runs steps one behind the other without waiting for them; takes the pages over."""
        for _ in range(count):
            logits, staged = self._programs.forward(self._params, pages, self._rows, tokens)
            tokens = self._programs.choose(logits, self._rows)
            pages = self._programs.publish(pages, staged, self._rows)
        return pages, tokens

    def parts(self, pages: Any, tokens: jax.Array) -> tuple[dict[str, float], Any]:
        """Seconds of each program alone, the median of some runs, and the pages."""
        seconds: dict[str, list[float]] = {name: [] for name in PARTS}
        for _ in range(_PART_RUNS):
            begin = time.perf_counter()
            logits, staged = jax.block_until_ready(
                self._programs.forward(self._params, pages, self._rows, tokens)
            )
            computed = time.perf_counter()
            jax.block_until_ready(self._programs.choose(logits, self._rows))
            chosen = time.perf_counter()
            pages = jax.block_until_ready(self._programs.publish(pages, staged, self._rows))
            ends = (computed - begin, chosen - computed, time.perf_counter() - chosen)
            for name, value in zip(PARTS, ends, strict=True):
                seconds[name].append(value)
        return {name: statistics.median(values) for name, values in seconds.items()}, pages


def pool_bytes(decoder: RandomDecoder, card: Mapping[str, Any], gib: int | None) -> float:
    """Bytes for pages: what was asked for, or most of what the weights leave of the card's memory."""
    if gib is not None:
        return gib * 2**30
    if card["memory_bytes"] is None:
        raise BenchmarkError(f"{card['kind']} doesn't tell its memory; give --pool-gib")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(decoder.params))
    return 0.85 * (card["memory_bytes"] - weights)


def measure_model(
    name: str, backends: Sequence[Backend], card: dict[str, Any], arguments: argparse.Namespace, begin: float
) -> list[dict[str, Any]]:
    """A row for each batch, context and backend, measured or with the reason why not."""
    sizes = [(batch, context) for context in arguments.contexts for batch in arguments.batch]
    late = f"not begun: {arguments.seconds} seconds were over; raise --seconds"
    if time.monotonic() - begin > arguments.seconds:
        return [
            {"model": name, "batch": batch, "context": context, "backend": backend, "reason": late}
            for batch, context in sizes
            for backend in backends
        ]
    shape = SHAPES[name]
    decoder = RandomDecoder(shape)
    size = arguments.block_size
    block_bytes = 2 * shape.num_kv_heads * size * shape.head_dim * 2 * shape.layers
    room = int(pool_bytes(decoder, card, arguments.pool_gib) // block_bytes)
    fits = {(b, c) for b, c in sizes if b * -(-c // size) <= room}
    num_blocks = max((b * -(-c // size) for b, c in fits), default=1)
    columns = max((-(-c // size) for _, c in fits), default=1)
    page = (num_blocks, 2, shape.num_kv_heads, size, shape.head_dim)
    shapes = (jax.ShapeDtypeStruct(page, jnp.bfloat16),) * shape.layers

    def compiled(batch: int, backend: Backend) -> Programs:
        return compile_programs(decoder, backend, shapes, rows_of(batch, 1, columns, num_blocks, size))

    needed = sorted({batch for batch, _ in fits})
    with ThreadPoolExecutor() as workers:
        futures = {(b, backend): workers.submit(compiled, b, backend) for b in needed for backend in backends}
    failures = {key: reason_of(error) for key, future in futures.items() if (error := future.exception())}
    programs = {key: future.result() for key, future in futures.items() if key not in failures}
    pages: Any = make_pages(page, shape.layers)
    rows: list[dict[str, Any]] = []
    for batch, context in sizes:
        live = batch * context * block_bytes // size
        bound = (decoder.bytes_read + live) / card["copy_rate"]
        row: dict[str, Any] = {"model": name, "batch": batch, "context": context}
        row |= {"weight_bytes": decoder.bytes_read, "live_bytes": live, "bound_seconds": bound}
        reason = None
        if (batch, context) not in fits:
            reason = (
                f"its keys take {batch * -(-context // size) * block_bytes / 2**30:.1f} GiB; raise --pool-gib"
            )
        elif time.monotonic() - begin > arguments.seconds:
            reason = late
        if reason is not None:
            rows += [row | {"backend": backend, "reason": reason} for backend in backends]
            continue
        print(f"{time.monotonic() - begin:5.0f} s: {name}, {batch} x {context}", file=sys.stderr, flush=True)
        where = rows_of(batch, context, columns, num_blocks, size)
        failed = {b: failures[batch, b] for b in backends if (batch, b) in failures}
        runs = [b for b in backends if b not in failed]
        contenders = {b: Contender(decoder, programs[batch, b], where) for b in runs}
        parts = {}
        # One step without memory shouldn't cost the others' figures.
        try:
            found, tokens, pages = in_turns(contenders, pages, batch, arguments)
            for backend, contender in contenders.items():
                parts[backend], pages = contender.parts(pages, jnp.asarray(tokens[backend]))
        except Exception as error:
            failed |= dict.fromkeys(runs, reason_of(error))
            runs, pages = [], None
            pages = make_pages(page, shape.layers)
        rows += [row | {"backend": backend, "reason": reason} for backend, reason in failed.items()]
        first = next(iter(runs), None)
        for backend in runs:
            seconds = found[backend]
            middle = statistics.median(seconds)
            pairs = zip(found[first], seconds, strict=True)
            rows.append(
                row
                | {
                    "backend": backend,
                    "reason": None,
                    "turns": seconds,
                    "parts": parts[backend],
                    "seconds": middle,
                    "over_bound": middle / bound,
                    "tokens_per_second": batch / middle,
                    "ratio": statistics.median(a / b for a, b in pairs),
                    "compared": first,
                    "same_tokens": float((tokens[first] == tokens[backend]).mean()),
                }
            )
    return rows


def in_turns(
    contenders: dict[Backend, Contender], pages: Any, batch: int, arguments: argparse.Namespace
) -> tuple[dict[Backend, list[float]], dict[Backend, np.ndarray], Any]:
    """Seconds a step of each contender by turn, the tokens of a first step, and the pages that come out."""
    tokens = jnp.arange(batch, dtype=jnp.int32)
    count, first_tokens = {}, {}
    for name, contender in contenders.items():
        pages, first = contender.steps(1, pages, tokens)
        first_tokens[name] = np.asarray(first)
        begin = time.perf_counter()
        pages, _ = jax.block_until_ready(contender.steps(1, pages, tokens))
        # Slow forms get fewer steps a turn.
        count[name] = min(max(int(1 / (time.perf_counter() - begin)), 1), arguments.steps)
    found: dict[Backend, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.turns):
        for name, contender in contenders.items():
            held = [pages]

            def turn(contender: Contender = contender, held: list = held, steps: int = count[name]) -> Any:
                held[:] = contender.steps(steps, held[0], tokens)
                return held

            found[name].append(seconds_of(turn) / count[name])
            pages = held[0]
    return found, first_tokens, pages


def make_pages(page: tuple[int, ...], layers: int) -> tuple[jax.Array, ...]:
    """Normal random pages of every layer."""
    fill = jax.jit(random_blocks, static_argnums=(1, 2))
    return tuple(fill(key, page, jnp.bfloat16) for key in jax.random.split(random_key(1), layers))


def measure(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        report.require_packages("matplotlib")
    begin = time.monotonic()
    hopper = compute_capability().startswith("9.0")
    backends = arguments.backends or (["mosaic_gpu", "xla"] if hopper else ["xla"])
    if "mosaic_gpu" in backends and not hopper:
        raise BenchmarkError("the mosaic_gpu backend needs a Hopper GPU; give --backends xla")
    machine, card = report.machine_facts(), card_facts()
    card["copy_rate"] = copy_rate(arguments.copy_mib, arguments.turns)
    rows = [row for name in arguments.models for row in measure_model(name, backends, card, arguments, begin)]
    names = ("block_size", "pool_gib", "steps", "turns", "copy_mib", "seconds")
    record = {
        "benchmark": "gpu_decode",
        "machine": machine,
        "device": card,
        "settings": {name: getattr(arguments, name) for name in names},
        "wanted": WANTED,
        "rows": rows,
    }
    title = (
        f"{describe_card(card)}\nmedians of {arguments.turns} turns; wanted of step / bound: {WANTED} at most"
    )
    report.conclude(record, f"{title}\n\n{tabulated(rows)}", arguments.json)
    if arguments.plot is not None:
        plots.draw(record, arguments.plot)


def tabulated(rows: Sequence[dict[str, Any]]) -> str:
    header = ("model", "rows", "context", "backend", "bound ms", "step ms", "step / bound")
    header = (*header, *PARTS, "tokens/s", "first / it", "same tokens", "note")
    cells = []
    for row in rows:
        line = [row["model"], str(row["batch"]), str(row["context"]), row["backend"]]
        line.append(f"{1e3 * row['bound_seconds']:.2f}" if "bound_seconds" in row else "")
        if "seconds" in row:
            line += [
                f"{1e3 * row['seconds']:.2f}",
                f"{row['over_bound']:.2f}",
                *(f"{1e3 * row['parts'][part]:.2f}" for part in PARTS),
                f"{row['tokens_per_second']:.0f}",
            ]
            line += [f"{row['ratio']:.2f}", f"{row['same_tokens']:.0%}"]
        else:
            line += [""] * (len(header) - len(line) - 1)
        cells.append((*line, row["reason"] or ""))
    return report.table(header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = report.at_least(1)
    parser.add_argument(
        "--models", choices=SHAPES, nargs="+", default=list(SHAPES), help="shapes of decoders"
    )
    parser.add_argument(
        "--batch", type=number, nargs="+", default=[32, 1, 8, 256], metavar="N", help="rows that decode"
    )
    parser.add_argument(
        "--contexts",
        type=number,
        nargs="+",
        default=[8192, 1024, 32_768],
        metavar="N",
        help="tokens of a row, the new one included",
    )
    parser.add_argument(
        "--backends",
        choices=["mosaic_gpu", "xla"],
        nargs="+",
        help="who attends and publishes; default: both on a Hopper GPU, else xla",
    )
    parser.add_argument("--block-size", type=number, default=16, metavar="N", help="slots of a block")
    parser.add_argument(
        "--pool-gib",
        type=number,
        metavar="N",
        help="leave out steps whose keys take more; default: most of what the weights leave of the card's memory",
    )
    parser.add_argument("--steps", type=number, default=16, metavar="N", help="steps of a turn")
    add_card_arguments(parser, seconds=200)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
