"""How many tokens a second does jaxengine decode, against ONNX Runtime GenAI on the same folder?

    python -m benchmarks.decode_throughput --folder FOLDER [--weights both] [--batch 1 4 8] [--json FILE]

Each contender has a process of its own with all cores; they take turns on the same prompts, pieces of a text in this
folder, and decode greedily with end-of-sequence tokens taken out, so that every turn makes the same number of tokens.
A turn's prefill runs until each row has its first token, its decode from there to the last one. The first turn of
each batch size isn't counted. Ratios are medians over turns of two figures that were taken side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.turns import BenchmarkError, Contender, Work, started, take_turns

TEXT = Path(__file__).parent / "data" / "prose.txt"
PEER = "ONNX Runtime GenAI"
BLOCK_SIZE = 16
MOST_SCHEDULED = 2048


def prompts(folder: Path, rows: int, length: int) -> list[list[int]]:
    """Rows of token ids: successive pieces of the text, which begins again where it ends."""
    from jaxengine.text import Tokenizer

    ids = Tokenizer.from_folder(folder).encode(TEXT.read_text(), add_special_tokens=False)
    return np.resize(np.array(ids), (rows, length)).tolist()


def make_jaxengine(folder: str, weights: str) -> Work:
    """Loads a model; a task gives its engine a batch of prompts."""
    import jaxengine as je

    model = je.load_model(folder, weights=weights)  # type: ignore[arg-type]
    # Without end-of-sequence tokens every row runs to its limit.
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=()))

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        rows, new_tokens = task["prompts"], task["new_tokens"]
        blocks = -(-(len(rows[0]) + new_tokens) // BLOCK_SIZE)
        config = je.EngineConfig(
            max_batch_size=len(rows),
            max_scheduled_tokens=min(len(rows) * len(rows[0]), MOST_SCHEDULED),
            num_blocks=len(rows) * blocks,
            block_size=BLOCK_SIZE,
        )
        with je.Engine(model, config) as engine:
            greedy = je.RequestOptions(sampling=je.SamplingParams(temperature=0.0))
            requests = [engine.create_request(greedy) for _ in rows]
            for request, row in zip(requests, rows, strict=True):
                request.begin_turn(row, je.TurnOptions(max_generated_tokens=new_tokens))
            begin = time.perf_counter()
            while any(request.length == len(row) for request, row in zip(requests, rows, strict=True)):
                engine.run()
            early = sum(request.length - len(row) for request, row in zip(requests, rows, strict=True))
            first, first_cpu = time.perf_counter(), time.process_time()
            while engine.has_pending_requests():
                engine.run()
            end, end_cpu = time.perf_counter(), time.process_time()
            tokens = [
                request.tokens[len(row) :].tolist() for request, row in zip(requests, rows, strict=True)
            ]
        return _timed(first - begin, end - first, end_cpu - first_cpu, tokens, early)

    return work


def make_peer(folder: str, threads: int) -> Work:
    """Loads a model into ONNX Runtime GenAI; a task gives a generator of its own a batch of prompts."""
    import onnxruntime_genai as og

    vocabulary = json.loads((Path(folder) / "genai_config.json").read_text())["model"]["vocab_size"]
    config = og.Config(folder)
    session = {"session_options": {"intra_op_num_threads": threads}}
    # It insists on an end-of-sequence token; the last id is as good as none.
    config.overlay(json.dumps({"model": {"eos_token_id": [vocabulary - 1], "decoder": session}}))
    model = og.Model(config)

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        rows, new_tokens = task["prompts"], task["new_tokens"]
        length = len(rows[0])
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(
            batch_size=len(rows),
            max_length=length + new_tokens,
            do_sample=False,
            past_present_share_buffer=True,
        )
        generator = og.Generator(model, parameters)
        begin = time.perf_counter()
        generator.append_tokens(np.array(rows, np.int32))
        generator.generate_next_token()
        first, first_cpu = time.perf_counter(), time.process_time()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        end, end_cpu = time.perf_counter(), time.process_time()
        tokens = [generator.get_sequence(i)[length:].tolist() for i in range(len(rows))]
        if any(len(row) != new_tokens or vocabulary - 1 in row for row in tokens):
            raise BenchmarkError(
                f"it generated token {vocabulary - 1}, which ends a row; take another prompt length"
            )
        return _timed(first - begin, end - first, end_cpu - first_cpu, tokens, len(rows))

    return work


def _timed(
    prefill: float, decode: float, decode_cpu: float, tokens: list[list[int]], early: int
) -> dict[str, Any]:
    """The measurements of a turn, in seconds; `early` tokens came with the prefill."""
    decoded = sum(map(len, tokens)) - early
    return {
        "prefill_seconds": prefill,
        "decode_tokens_per_second": decoded / decode,
        "decode_cpu_seconds": decode_cpu,
        "tokens": tokens,
    }


def summary(batch: int, name: str, turns: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the result: medians of a contender's turns, and of their ratios to the peer's."""

    def median_ratio(key: str) -> float:
        return statistics.median(ours[key] / theirs[key] for ours, theirs in zip(turns, peer, strict=True))

    same = [
        _equal_prefix(ours, theirs)
        for ours, theirs in zip(turns[0]["tokens"], peer[0]["tokens"], strict=True)
    ]
    return {
        "batch": batch,
        "contender": name,
        "decode_tokens_per_second": statistics.median(turn["decode_tokens_per_second"] for turn in turns),
        "decode_ratio": median_ratio("decode_tokens_per_second"),
        "prefill_seconds": statistics.median(turn["prefill_seconds"] for turn in turns),
        "prefill_speed_ratio": 1 / median_ratio("prefill_seconds"),
        "decode_cpu_ratio": median_ratio("decode_cpu_seconds"),
        "same_tokens": statistics.mean(same),
        "turns": [{key: value for key, value in turn.items() if key != "tokens"} for turn in turns],
    }


def _equal_prefix(ours: list[int], theirs: list[int]) -> float:
    """Share of a row before the first difference."""
    differs = np.flatnonzero(np.array(ours) != np.array(theirs))
    return float(differs[0] / len(ours)) if len(differs) else 1.0


def measure(arguments: argparse.Namespace) -> None:
    report.require_packages("onnxruntime-genai")
    folder: Path = arguments.folder
    context = json.loads((folder / "genai_config.json").read_text())["model"]["context_length"]
    if arguments.prompt_tokens + arguments.new_tokens > context:
        raise BenchmarkError(
            f"{arguments.prompt_tokens} prompt and {arguments.new_tokens} new tokens don't fit the context of {context}"
        )
    forms = ("exact", "fast") if arguments.weights == "both" else (arguments.weights,)
    contenders = [Contender(f"jaxengine {form}", make_jaxengine, (str(folder), form)) for form in forms]
    contenders.append(Contender(PEER, make_peer, (str(folder), report.cores())))
    machine = report.machine_facts()
    rows = []
    with started(contenders) as processes:
        for batch in arguments.batch:
            texts = prompts(folder, batch, arguments.prompt_tokens)
            turns = take_turns(
                processes, {"prompts": texts, "new_tokens": arguments.new_tokens}, arguments.turns
            )
            rows += [summary(batch, name, turns[name], turns[PEER]) for name in processes]
    record = {
        "benchmark": "decode_throughput",
        "machine": machine,
        "settings": {
            "folder": folder.name,
            "prompt_tokens": arguments.prompt_tokens,
            "new_tokens": arguments.new_tokens,
            "turns": arguments.turns,
        },
        "rows": rows,
    }
    header = (
        "contender",
        "rows",
        "decode tok/s",
        "ratio",
        "prefill s",
        "prefill speed",
        "decode cpu",
        "same tokens",
    )
    cells = [
        (
            row["contender"],
            str(row["batch"]),
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['decode_ratio']:.2f}",
            f"{row['prefill_seconds']:.3f}",
            f"{row['prefill_speed_ratio']:.2f}",
            f"{row['decode_cpu_ratio']:.2f}",
            f"{row['same_tokens']:.0%}",
        )
        for row in rows
    ]
    title = (
        f"{folder.name}, {arguments.prompt_tokens} prompt and {arguments.new_tokens} new tokens a row, "
        f"medians of {arguments.turns} turns; ratio, prefill speed and decode cpu are relative to {PEER}"
    )
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="decode_throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=report.existing_folder, required=True, help="one that both read")
    parser.add_argument(
        "--weights", choices=("exact", "fast", "both"), default="exact", help="how int4 is held"
    )
    parser.add_argument("--batch", nargs="+", type=report.at_least(1), default=[1, 4, 8], metavar="ROWS")
    parser.add_argument(
        "--prompt-tokens", type=report.at_least(1), default=48, metavar="N", help="of each row"
    )
    parser.add_argument("--new-tokens", type=report.at_least(2), default=64, metavar="N", help="of each row")
    parser.add_argument("--turns", type=report.at_least(1), default=5, metavar="N", help="of each contender")
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
