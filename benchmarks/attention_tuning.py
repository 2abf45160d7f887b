"""Which cuts of its work suit the attention kernel on a card? Writes a table that `pallas_kernels.tuning` reads.

    python -m benchmarks.attention_tuning --out sm_90.json

For each entry of the present table it times the kernel on a step that the entry serves, decode of 32 rows at 8k or
prefill of 8k, with every cut that the table's rules allow, and keeps the fastest; an entry for which no cut runs stays
as it is. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks import report
from benchmarks.attention_cases import Case, Heads, make_inputs
from benchmarks.attention_contenders import CONTENDERS, Contender, repeated
from benchmarks.card import seconds_of
from benchmarks.turns import BenchmarkError
from pallas_kernels import best_tile_size
from pallas_kernels.backends import compute_capability
from pallas_kernels.tuning import AttentionEntry, Table, attention_tuning, parse, table

_DECODE_ROWS = 64
# Other key tiles would narrow the block sizes that the kernel takes.
_KEY_TILES, _STAGES = (64, 128), (2, 3, 4, 6)
_STAGED_TILES = (16, 64, 128)


def candidates(entry: AttentionEntry) -> list[AttentionEntry]:
    """Cuts that may serve in the entry's place, itself first; a step that decodes has few staged tokens."""
    staged = (16,) if entry.rows <= _DECODE_ROWS else _STAGED_TILES
    cuts = [
        dataclasses.replace(entry, key_tile=key_tile, staged_tile=staged_tile, stages=stages)
        for key_tile in _KEY_TILES
        for staged_tile in staged
        if staged_tile <= key_tile
        for stages in _STAGES
    ]
    return [entry, *(cut for cut in cuts if cut != entry)]


def case_for(entry: AttentionEntry) -> Case:
    """A step that the entry serves."""
    heads = Heads(f"heads of {entry.head_dim}", 32, 8, entry.head_dim)
    return Case(heads, 32, 1, 8191) if entry.rows <= _DECODE_ROWS else Case(heads, 1, 8192, 0)


def best_of(present: Table, times: Callable[[AttentionEntry], dict[AttentionEntry, float]]) -> Table:
    """The table with each entry's fastest candidate; `times` gives those that ran."""
    entries = []
    for entry in present.attention:
        seconds = times(entry)
        entries.append(min(seconds, key=seconds.__getitem__, default=entry))
    return dataclasses.replace(present, attention=tuple(entries))


def kernel_with(entry: AttentionEntry) -> Contender:
    """Our kernel cut as the entry says; how many thread blocks share a row stays as it is."""
    from pallas_kernels.mosaic import attention, packing, units

    ours = CONTENDERS["mosaic_gpu"]

    def attend(case: Case, query: jax.Array, shared: Any, own: Any) -> jax.Array:
        (pages, tiles, sinks), (blocks, staged) = shared, own
        heads = case.heads
        group = heads.num_heads // heads.num_kv_heads
        size = 1 if case.new == 1 else best_tile_size(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        items = tiles.place.shape[0] * heads.num_kv_heads
        reach = case.columns * case.block_size
        cut = attention_tuning(heads.head_dim, size * group, items, reach, batch_invariant=False)
        fields = {name: getattr(entry, name) for name in ("key_tile", "staged_tile", "stages")}
        return packing.ragged_attention(
            query,
            staged,
            pages,
            blocks,
            tiles,
            sinks,
            tile_size=size,
            layer=attention.Layer(group, heads.head_dim**-0.5),
            tuning=dataclasses.replace(cut, **fields),
            units=units.TENSOR_CORES,
        )

    return dataclasses.replace(ours, attend=attend)


def measured(entry: AttentionEntry, turns: int, calls: int) -> dict[AttentionEntry, float]:
    """Median seconds a call of each candidate that compiles and runs; prints them all."""
    case, inputs = case_for(entry), make_inputs(case_for(entry), 1)
    shared, own = CONTENDERS["mosaic_gpu"].operands(case, inputs)

    def compiled(cut: AttentionEntry) -> Any:
        program = jax.jit(repeated(kernel_with(cut), case, 1, calls))
        return program.lower(inputs.query, shared, own).compile()

    seconds: dict[AttentionEntry, float] = {}
    with ThreadPoolExecutor() as workers:
        futures = {cut: workers.submit(compiled, cut) for cut in candidates(entry)}
    for cut, future in futures.items():
        # Too much shared memory, too few registers: Mosaic and the card refuse in many ways.
        try:
            dispatch = functools.partial(future.result(), inputs.query, shared, own)
            jax.block_until_ready(dispatch())
            seconds[cut] = statistics.median(seconds_of(dispatch) for _ in range(turns)) / calls
            print(f"{1e6 * seconds[cut]:9.1f} us  {cut}", flush=True)
        except Exception as error:
            print(f"{'refused':>12}  {cut}: {str(error).strip().splitlines()[:1]}"[:200], flush=True)
    return seconds


def as_json(found: Table) -> str:
    """The text of a table, which `parse` reads back as the same."""
    text = json.dumps(dataclasses.asdict(found), indent=1) + "\n"
    if parse(text) != found:
        raise BenchmarkError("the table that was found isn't one that can be read back; keep the present one")
    return text


def measure(arguments: argparse.Namespace) -> None:
    if not compute_capability().startswith("9.0"):
        raise BenchmarkError("the attention kernel can be tuned on a Hopper GPU only; run this on one")
    present = dataclasses.replace(
        table(), multiprocessors=getattr(jax.devices()[0], "core_count", table().multiprocessors)
    )
    found = best_of(present, lambda entry: measured(entry, arguments.turns, arguments.calls))
    arguments.out.write_text(as_json(found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="attention_tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = report.at_least(1)
    parser.add_argument(
        "--out", type=report.output_file, required=True, metavar="FILE", help="where the table goes"
    )
    parser.add_argument(
        "--turns", type=number, default=5, metavar="N", help="measured dispatches of each cut"
    )
    parser.add_argument("--calls", type=number, default=20, metavar="N", help="calls of a dispatch")
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
