"""How long does a request wait while others are served, and what does it cost to keep that short?

    python -m benchmarks.fairness [--bound 64] [--blocks 32 48 96] [--json FILE]

Random loads (`benchmarks.waits`) in pools from tight to roomy, under five policies, with preemption and without. The
smallest pool holds the largest session. A wait is a request's longest run of steps that served others: `could run`
counts those in which nothing was missing, `for blocks` adds those in which it waited for blocks, and `crowded` is the
same for requests that don't fit into the pool beside those ahead of them. Preemptions and tokens that are run again
are the price. Without preemption somebody has to close a session whenever nothing can run any more; that is what
`forced` counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxengine as je
from benchmarks import report
from benchmarks.waits import Outcome, random_sessions, simulate
from jaxengine.policies import Candidates, SchedulingPolicy, decode_first

BLOCK_SIZE = 16
KINDS = {"runnable": "could run", "covered": "for blocks", "crowded": "crowded"}


def prefill_first(candidates: Candidates) -> np.ndarray:
    """The reverse of `decode_first`: waiting requests, prefills, decodes."""
    return decode_first(candidates)[::-1]


def shortest_first(candidates: Candidates) -> np.ndarray:
    """Whoever has the fewest tokens to run, in order of creation."""
    return np.argsort(candidates.num_unprocessed, kind="stable")


def newest_first(candidates: Candidates) -> np.ndarray:
    """The oldest request comes last, always."""
    return np.arange(len(candidates.request_ids))[::-1]


def hostile(candidates: Candidates) -> np.ndarray:
    """Serves first whoever was served last."""
    return np.lexsort((-candidates.rank, candidates.waited))


POLICIES: dict[str, SchedulingPolicy] = {
    policy.__name__: policy for policy in (decode_first, prefill_first, shortest_first, newest_first, hostile)
}


def summary(config: je.EngineConfig, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of the result: what came of all loads under one configuration."""
    waits = [wait for outcome in outcomes for wait in outcome.waits]
    row: dict[str, Any] = {
        "policy": config.policy.__name__,
        "preemption": config.preemption,
        "num_blocks": config.num_blocks,
        "requests": len(waits),
        "replayed_share": sum(o.replayed for o in outcomes) / sum(o.tokens for o in outcomes),
    }
    for count in ("steps", "preemptions", "forced", "overtaken"):
        row[count] = sum(getattr(outcome, count) for outcome in outcomes)
    for kind in KINDS:
        values = np.array([getattr(wait, kind) for wait in waits])
        p50, p99 = np.quantile(values, [0.5, 0.99]).tolist()
        row[kind] = {"p50": p50, "p99": p99, "max": int(values.max())}
    return row


def measure(arguments: argparse.Namespace) -> None:
    rows = []
    slots = min(arguments.blocks) * BLOCK_SIZE
    loads = [
        random_sessions(seed, arguments.sessions, slots, arguments.arrivals)
        for seed in range(arguments.loads)
    ]
    for policy in POLICIES.values():
        for num_blocks in arguments.blocks:
            for preemption in ("recompute", "none"):
                config = je.EngineConfig(
                    max_batch_size=arguments.places,
                    max_scheduled_tokens=256,
                    num_blocks=num_blocks,
                    block_size=BLOCK_SIZE,
                    chunk_size=64,
                    fairness_bound=arguments.bound,
                    policy=policy,
                    preemption=preemption,
                )
                rows.append(summary(config, [simulate(config, sessions) for sessions in loads]))
    record = {
        "benchmark": "fairness",
        "machine": report.machine_facts(),
        "settings": {
            name: getattr(arguments, name)
            for name in ("bound", "loads", "sessions", "arrivals", "places", "blocks")
        },
        "rows": rows,
    }
    header = ("policy", "preemption", "blocks", *KINDS.values(), "preempted", "run again", "forced")
    cells = [
        (
            row["policy"],
            row["preemption"],
            str(row["num_blocks"]),
            *(f"{row[kind]['p50']:.0f} / {row[kind]['p99']:.0f} / {row[kind]['max']}" for kind in KINDS),
            f"{row['preemptions'] / row['requests']:.2f}",
            f"{row['replayed_share']:.1%}",
            str(row["forced"]),
        )
        for row in rows
    ]
    title = (
        f"bound {arguments.bound}, {arguments.loads} loads of {arguments.sessions} sessions, {arguments.places} places"
        "; waits in steps: median / 99th percentile / longest; preempted is per session"
    )
    report.conclude(record, f"{title}\n\n{report.table(header, cells)}", arguments.json)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "bound": (64, "the engine's fairness_bound"),
        "loads": (5, "loads, the same for all"),
        "sessions": (50, "sessions of a load"),
        "places": (16, "the engine's max_batch_size"),
    }
    for name, (default, meaning) in sizes.items():
        parser.add_argument(f"--{name}", type=report.at_least(1), default=default, metavar="N", help=meaning)
    parser.add_argument(
        "--blocks", nargs="+", type=report.at_least(1), default=[32, 48, 96], metavar="N", help="pools"
    )
    parser.add_argument("--arrivals", type=float, default=0.1, metavar="X", help="sessions a step")
    report.add_json_argument(parser)
    arguments = parser.parse_args(argv)
    return report.run(lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
