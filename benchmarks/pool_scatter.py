"""Does a commit write the KV pool in place?

    python -m benchmarks.pool_scatter [--pool-mib 1536] [--json FILE]

Times the program that commits a step's keys and values (`Programs.publish`, which takes the pool over) against the
same program without donation (`commit(..., donate=False)`), which has to copy the pool. Each runs in a process of its
own, on a pool of its own, and reports the most memory that the process held: a commit that copied would need a second
pool. Two steps: a decode of one token for each of some rows, and a prefill of one long row.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxengine
from benchmarks import report
from benchmarks.memory import process_memory
from benchmarks.turns import BenchmarkError, Contender, Work, started

BLOCK_SIZE = 16
FORMS = ("in place", "copying")


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of a float32 pool."""

    layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4 * BLOCK_SIZE


def make_commit(form: str, pool: Pool, rows: int, tokens: int) -> Work:
    """Allocates a pool; a task commits `tokens` tokens of `rows` rows into it."""
    import jax
    import jax.numpy as jnp

    from jaxengine.programs import Destinations

    model = _model_without_weights(pool, max(rows, tokens))
    program = model.programs.publish if form == "in place" else model.programs.publish_copy
    config = jaxengine.EngineConfig(max_batch_size=rows, num_blocks=pool.num_blocks, block_size=BLOCK_SIZE)
    store = jaxengine.init_state(model, config).store
    pages, block_table = store.pages, store.block_table
    staged = tuple(jnp.ones((tokens, 2, pool.kv_heads, pool.head_dim)) for _ in range(pool.layers))
    row, place_in_row = np.divmod(np.arange(tokens, dtype=np.int32), tokens // rows)
    column = place_in_row // BLOCK_SIZE
    scattered = np.random.default_rng(0).permutation(pool.num_blocks).astype(np.int32)
    blocks_of_row = column.max() + 1
    block, no_states = scattered[row * blocks_of_row + column], np.zeros(0, np.int32)
    to = Destinations(row, column, block, place_in_row % BLOCK_SIZE, no_states)
    jax.block_until_ready((pages, block_table, staged))
    analysis = program.lower(pages, block_table, (), staged, (), to).compile().memory_analysis()
    assert analysis is not None
    resting = process_memory("VmRSS")

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal pages, block_table
        begin = time.perf_counter()
        result = jax.block_until_ready(program(pages, block_table, (), staged, (), to))
        seconds = time.perf_counter() - begin
        if form == "in place":
            pages, block_table, _ = result
        return {
            "seconds": seconds,
            "peak_bytes": process_memory("VmHWM"),
            "resting_bytes": resting,
            "aliased_bytes": analysis.alias_size_in_bytes,
            "temporary_bytes": analysis.temp_size_in_bytes,
        }

    return work


def _model_without_weights(pool: Pool, context: int) -> jaxengine.Model:
    """A model of which only the layers' shapes count: committing uses neither weights nor graph."""
    from jaxengine.programs import Programs
    from onnx_import import AttentionSpec, Decoder, FolderConfig
    from onnx_import.plan import Plan

    layers = tuple(
        AttentionSpec(i, pool.kv_heads, pool.kv_heads, pool.head_dim, 1.0, np.dtype(np.float32))
        for i in range(pool.layers)
    )
    nothing = Plan(
        input_ids="",
        position_ids="",
        logits="",
        token_axis=0,
        position_axes=(),
        head=(),
        cut={},
        tail=(),
        weights={},
        fixed=(),
    )
    decoder = Decoder(layers=layers, fixed=(), vocab_size=1, params={}, identity="", plan=nothing)
    config = FolderConfig("", 1, context, context, (), None, None, {}, ())
    return jaxengine.Model(decoder=decoder, config=config, path=Path(), programs=Programs(decoder))


def measure(arguments: argparse.Namespace) -> None:
    pool = Pool(arguments.layers, arguments.kv_heads, arguments.head_dim, num_blocks=0)
    pool = dataclasses.replace(pool, num_blocks=arguments.pool_mib * 2**20 // pool.block_bytes)
    needed = max(arguments.decode_rows, -(-arguments.prefill_tokens // BLOCK_SIZE))
    if pool.num_blocks < needed:
        raise BenchmarkError(
            f"a pool of {arguments.pool_mib} MiB has {pool.num_blocks} blocks of the {needed} needed; raise --pool-mib"
        )
    pool_bytes = pool.num_blocks * pool.block_bytes
    machine = report.machine_facts()
    rows = []
    steps = (
        ("decode", arguments.decode_rows, arguments.decode_rows),
        ("prefill", 1, arguments.prefill_tokens),
    )
    for step, batch, tokens in steps:
        found = {form: commits(form, (pool, batch, tokens), arguments.turns) for form in FORMS}
        for form in FORMS:
            ours, copying = found[form], found["copying"]
            row = {
                "step": step,
                "tokens": tokens,
                "form": form,
                "seconds": statistics.median(turn["seconds"] for turn in ours),
                "peak_bytes": ours[-1]["peak_bytes"],
                "resting_bytes": ours[-1]["resting_bytes"],
                "aliased_bytes": ours[-1]["aliased_bytes"],
                "temporary_bytes": ours[-1]["temporary_bytes"],
                "turns": [turn["seconds"] for turn in ours],
            }
            row["time_ratio"] = row["seconds"] / statistics.median(turn["seconds"] for turn in copying)
            row["memory_ratio"] = row["peak_bytes"] / copying[-1]["peak_bytes"]
            row["extra_pools"] = (row["peak_bytes"] - row["resting_bytes"]) / pool_bytes
            rows.append(row)
    record = {
        "benchmark": "pool_scatter",
        "machine": machine,
        "settings": {
            "pool_bytes": pool_bytes,
            "pool": dataclasses.asdict(pool),
            "turns": arguments.turns,
        },
        "rows": rows,
    }
    header = (
        "commit",
        "tokens",
        "form",
        "ms",
        "time ratio",
        "peak MiB",
        "memory ratio",
        "pools on top",
        "aliased",
    )
    cells = [
        (
            row["step"],
            str(row["tokens"]),
            row["form"],
            f"{1e3 * row['seconds']:.2f}",
            f"{row['time_ratio']:.5f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['memory_ratio']:.2f}",
            f"{row['extra_pools']:.2f}",
            f"{row['aliased_bytes'] / pool_bytes:.0%}",
        )
        for row in rows
    ]
    title = (
        f"a pool of {pool_bytes / 2**20:.0f} MiB in {arguments.layers} layers, medians of {arguments.turns} turns; "
        "ratios are relative to the copying form"
    )
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def commits(form: str, arguments: tuple[Pool, int, int], turns: int) -> list[dict[str, Any]]:
    """Measures one form in a fresh process, after once unmeasured."""
    with started([Contender(form, make_commit, (form, *arguments))]) as processes:
        processes[form].do({})
        return [processes[form].do({}) for _ in range(turns)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pool_scatter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "pool-mib": (1536, "size of the pool; the copying form holds two"),
        "layers": (30, "arrays that the pool is made of"),
        "kv-heads": (3, "key heads of a layer"),
        "head-dim": (64, "numbers of a head"),
        "decode-rows": (8, "rows of the decode step"),
        "prefill-tokens": (2048, "tokens of the prefill step"),
        "turns": (5, "measured commits of each form"),
    }
    for name, (default, meaning) in sizes.items():
        parser.add_argument(f"--{name}", type=report.at_least(1), default=default, metavar="N", help=meaning)
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
