"""Draws what the benchmarks of a card measured, from their JSON alone.

    python -m benchmarks.plots RESULT.json PICTURE.png

Needs matplotlib: `pip install 'jaxengine[plots]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.turns import BenchmarkError

_ACROSS = 4


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Writes a picture in the format of the file's ending.

    Raises:
        BenchmarkError: matplotlib is missing, the record has nothing to draw, or there is no such format.
    """
    report.require_packages("matplotlib")
    try:
        panels = PANELS[record["benchmark"]](record)
    except KeyError:
        raise BenchmarkError(
            f"only results of {' and '.join(PANELS)} can be drawn, not of {record.get('benchmark')}"
        ) from None
    if not panels:
        raise BenchmarkError("the result holds no measured row to draw")
    from matplotlib.figure import Figure

    across = min(len(panels), _ACROSS)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(5 * across, 4 * down), layout="constrained")
    figure.suptitle(f"{record['benchmark']} on {record['device']['kind']}")
    for place, (title, label, series) in enumerate(panels, start=1):
        axes = figure.add_subplot(down, across, place)
        for name, points in series.items():
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, marker="o", label=name)
        axes.set(title=title, ylabel=label)
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", labelrotation=90)
        axes.legend(fontsize="small")
    try:
        figure.savefig(file)
    except ValueError as error:
        raise BenchmarkError(f"{file} can't be drawn: {error}") from error


Panel = tuple[str, str, dict[str, list[tuple[str, float]]]]


def _attention(record: Mapping[str, Any]) -> list[Panel]:
    """A panel a model and kind of step; where decoding, the share of the rate of copying."""
    panels: dict[tuple[str, bool], dict[str, list[tuple[str, float]]]] = {}
    for row in record["rows"]:
        if "seconds" in row:
            decodes = row["new"] == 1
            place = f"{row['batch']} x {row['context']}" if decodes else f"{row['new']} behind {row['past']}"
            figure = row["of_copies" if decodes else "of_products"]
            series = panels.setdefault((row["model"], decodes), {})
            series.setdefault(row["contender"], []).append((place, figure))
    return [
        (
            f"{model}, {'decode' if decodes else 'prefill'}",
            f"share of the measured rate of {'copying' if decodes else 'products'}",
            series,
        )
        for (model, decodes), series in panels.items()
    ]


def _decode(record: Mapping[str, Any]) -> list[Panel]:
    """A panel a model: the time of a step over its memory bound."""
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in record["rows"]:
        if "seconds" in row:
            place = f"{row['batch']} x {row['context']}"
            series = panels.setdefault(row["model"], {})
            series.setdefault(row["backend"], []).append((place, row["over_bound"]))
    return [(model, "step over its memory bound", series) for model, series in panels.items()]


PANELS = {"attention_kernels": _attention, "gpu_decode": _decode}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("picture", type=report.output_file, help="the file to write")
    arguments = parser.parse_args(argv)

    def work() -> None:
        try:
            record = json.loads(arguments.result.read_text())
        except (OSError, ValueError) as error:
            raise BenchmarkError(f"{arguments.result} can't be read: {error}") from error
        draw(record, arguments.picture)

    return report.run(work)


if __name__ == "__main__":
    sys.exit(main())
