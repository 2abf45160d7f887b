"""Contenders that other processes can find by name."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.turns import BenchmarkError, Work


def diary(file: str, name: str) -> Work:
    """Appends its name to a file at each task."""

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        with Path(file).open("a") as log:
            log.write(name)
        return {"name": name, **task}

    return work


def busy_while_waiting(seconds: float) -> Work:
    """Uses the processor in a thread for some time after a task has ended, as a spinning pool does."""
    import threading

    def spin() -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        threading.Thread(target=spin, daemon=True).start()
        return {}

    return work


def broken(when: str) -> Work:
    """Fails, or dies, while it is made or at work."""
    if when == "made":
        raise BenchmarkError("no such\nmodel")

    def work(task: Mapping[str, Any]) -> dict[str, Any]:
        if when == "dead":
            os._exit(9)
        raise ValueError("bad task")

    return work
