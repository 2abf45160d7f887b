"""Turns of one engine, timed from the step behind the prefill on, two kinds of request in alternation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jaxengine as je
from benchmarks import report


def timed_turn(
    engine: je.Engine, options: je.RequestOptions, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """Serves the prompts side by side; seconds and steps leave out all up to the first token of each.

    Returns:
        `tokens`, a list a prompt; `seconds`, `steps` and `timed_tokens`; `drafted` and `accepted` drafts.
    """
    requests = [engine.create_request(options) for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(new_tokens))
    while any(request.length == len(prompt) for request, prompt in zip(requests, prompts, strict=True)):
        engine.run()
    before, begin = engine.metrics, time.perf_counter()
    early = sum(request.length - len(prompt) for request, prompt in zip(requests, prompts, strict=True))
    while engine.has_pending_requests():
        engine.run()
    seconds, after = time.perf_counter() - begin, engine.metrics
    tokens = [
        request.tokens.tolist()[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)
    ]
    for request in requests:
        request.close()
    return {
        "tokens": tokens,
        "seconds": seconds,
        "steps": after.steps - before.steps,
        "timed_tokens": sum(map(len, tokens)) - early,
        "drafted": after.drafted_tokens - before.drafted_tokens,
        "accepted": after.accepted_drafts - before.accepted_drafts,
    }


def in_alternation(
    engine: je.Engine,
    kinds: Mapping[str, je.RequestOptions],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    turns: int,
) -> dict[str, list[dict[str, Any]]]:
    """The kinds' turns, after one of each that isn't measured: A B A B; the nth of two were taken side by side."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, options in kinds.items():
            result = timed_turn(engine, options, prompts, new_tokens)
            if turn:
                results[name].append(result)
    return results


def engine_for(model: je.Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> je.Engine:
    """An engine with room for the prompts and their answers."""
    longest = max(map(len, prompts))
    config = je.EngineConfig(
        max_batch_size=len(prompts),
        max_scheduled_tokens=max(len(prompts) * longest, 64),
        num_blocks=len(prompts) * -(-(longest + new_tokens) // 16),
        block_size=16,
    )
    return je.Engine(model, config)


def add_turn_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every comparison of turns takes: the model, the sizes, and where the JSON goes."""
    number = report.at_least(1)
    parser.add_argument(
        "--folder",
        type=report.existing_folder,
        metavar="FOLDER",
        help="the model, with a tokenizer; default: the demo model",
    )
    parser.add_argument(
        "--weights", choices=["exact", "fast"], default="exact", help="how quantised matrices are multiplied"
    )
    parser.add_argument(
        "--batch", type=number, nargs="+", default=[1, 8], metavar="N", help="rows to compare"
    )
    parser.add_argument(
        "--new-tokens", type=report.at_least(2), default=64, metavar="N", help="tokens generated a row"
    )
    parser.add_argument("--turns", type=number, default=5, metavar="N", help="measured turns of each kind")
    report.add_json_argument(parser)
