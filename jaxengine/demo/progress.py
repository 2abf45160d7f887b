"""Progress of long work: a callable that is told (stage, done, total), and the bar that draws it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Report(Protocol):
    """Is told how far a named stage has come."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are done."""


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar a stage, drawn on standard error while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield report
