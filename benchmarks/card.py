"""What a device is and what it does at most: its name, and its rates of copying memory and of multiplying matrices."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.random_arrays import random_key

_DISPATCHES = 8


def card_facts() -> dict[str, Any]:
    """The default device as JAX names it: platform, kind, compute capability, memory, runtime."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "none")),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "runtime": " ".join(device.client.platform_version.split()),
    }


def describe_card(card: Mapping[str, Any]) -> str:
    """One line about the device and its rates; it says so where that is no GPU."""
    kind = f"device: {card['kind']} ({card['platform']})"
    if card["platform"] not in ("gpu", "cuda"):
        kind += ", NOT a GPU: these figures only show that the script runs"
    rates = f"copies {card['copy_rate'] / 1e9:.4g} GB/s, read and written"
    if "matrix_rate" in card:
        rates += f", multiplies {card['matrix_rate'] / 1e12:.4g} TFLOP/s in bfloat16"
    return f"{kind}; {rates}"


def copy_rate(mib: int, turns: int) -> float:
    """Bytes read and written a second while an array of `mib` MiB becomes another; the median of `turns`."""
    array = jnp.arange(mib * 2**18, dtype=jnp.uint32)
    return 2 * array.nbytes / _seconds_in_a_row(jax.jit(lambda x: x + 1), array, turns)


def matrix_rate(size: int, turns: int) -> float:
    """Operations a second of bfloat16 products [size, size] @ [size, size]; the median of `turns`."""
    left, right = jax.random.normal(random_key(0), (2, size, size), jnp.bfloat16)
    # Products of products keep their size.
    right = right / jnp.sqrt(size).astype(right.dtype)
    return 2 * size**3 / _seconds_in_a_row(jax.jit(functools.partial(jnp.matmul, right)), left, turns)


def reason_of(error: Exception) -> str:
    """One short line about why something can't run: compilers and runtimes say much more."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def seconds_of(dispatch: Callable[[], Any]) -> float:
    """Seconds until all that `dispatch` makes is there."""
    begin = time.perf_counter()
    jax.block_until_ready(dispatch())
    return time.perf_counter() - begin


def _seconds_in_a_row(program: Callable[[jax.Array], jax.Array], array: jax.Array, turns: int) -> float:
    """Median seconds of one of several programs that wait for each other but not for the host."""

    def chain() -> jax.Array:
        value = array
        for _ in range(_DISPATCHES):
            value = program(value)
        return value

    jax.block_until_ready(chain())
    return statistics.median(seconds_of(chain) for _ in range(turns)) / _DISPATCHES


def add_card_arguments(parser: argparse.ArgumentParser, *, seconds: int) -> None:
    """Adds what every benchmark of a card takes: sizes for its rates, turns, time, and where results go."""
    number = report.at_least(1)
    parser.add_argument(
        "--copy-mib", type=number, default=2048, metavar="N", help="size of the array that is copied"
    )
    parser.add_argument("--turns", type=number, default=5, metavar="N", help="measured turns of each")
    parser.add_argument(
        "--seconds",
        type=number,
        default=seconds,
        metavar="N",
        help="no further case is begun after this time; those left out are named",
    )
    report.add_json_argument(parser)
    parser.add_argument(
        "--plot", type=report.output_file, metavar="FILE", help="draw the figures here; needs matplotlib"
    )
