"""`jaxengine inspect`: what the importer sees in a model folder, before any weight is read."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onnx_import import FolderReport, ModelFolder, inspect_folder, read_folder


class _Console(Console):
    """A console that leaves a closed pipe to the command's frame, where rich would end the process itself."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what is in a model folder",
        description="Show the operators, state and weights of a model folder, and all that isn't supported. The exit "
        "status is 0 whenever the folder can be read.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the model folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    folder = read_folder(arguments.folder)
    described = _described(folder, inspect_folder(folder))
    if arguments.json:
        _Console(soft_wrap=True).out(json.dumps(described, indent=2), highlight=False)
    else:
        _print(described)
    return 0


def _described(folder: ModelFolder, report: FolderReport) -> dict[str, Any]:
    """The report as plain data, the same for people and for scripts."""
    config = folder.config
    return {
        "model_type": report.model_type,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "max_length": config.max_length,
        "eos_token_ids": list(config.eos_token_ids),
        "operators": [
            {"domain": domain, "type": name, "count": count}
            for (domain, name), count in report.operators.items()
        ],
        "skipped_nodes": report.skipped_nodes,
        "state_groups": [
            {"kind": group.kind, "layers": list(group.layer_ids), "assumed": group.derived}
            for group in report.state_groups
        ],
        "weight_bytes": report.weight_bytes,
        "weight_bytes_by_type": dict(report.weight_bytes_by_type),
        "unsupported": list(report.unsupported),
        "notes": list(report.notes),
    }


def _print(described: dict[str, Any]) -> None:
    console = _Console(highlight=False, soft_wrap=True)
    eos = ", ".join(map(str, described["eos_token_ids"])) or "none"
    _table(
        console,
        "",
        [
            ("model type", described["model_type"]),
            ("vocabulary", f"{described['vocab_size']:,}"),
            (
                "context",
                f"{described['context_length']:,} tokens, a session at most {described['max_length']:,}",
            ),
            ("end of turn", f"token {eos}"),
            ("weights", f"{described['weight_bytes']:,} bytes"),
            *((f"  {name}", f"{size:,} bytes") for name, size in described["weight_bytes_by_type"].items()),
        ],
    )
    _table(
        console,
        "state",
        [
            (group["kind"], f"layers {_ranges(group['layers'])}{' (assumed)' if group['assumed'] else ''}")
            for group in described["state_groups"]
        ],
    )
    _table(
        console,
        f"operators ({described['skipped_nodes']} nodes are not needed)",
        [
            (f"{entry['domain'] or 'ai.onnx'}.{entry['type']}", f"{entry['count']}")
            for entry in described["operators"]
        ],
    )
    for title, sentences in (("unsupported", described["unsupported"]), ("notes", described["notes"])):
        if sentences:
            console.print(f"\n[bold]{title}[/]")
        for sentence in sentences:
            console.print(f"  {sentence}", markup=False)


def _table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    if title:
        console.print(f"\n[bold]{title}[/]")
    table = Table(box=box.SIMPLE, show_header=False, show_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _ranges(layers: list[int]) -> str:
    """`0-3, 7`: runs of layers, in order."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
