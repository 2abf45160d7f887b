"""Programs measured in turns: each lives in a process of its own, and one works while the others wait for work.

A thread pool that spins after its last task would take cores from whoever comes next, so contenders share no process,
and each turn reports how much processor time its process used while it waited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Work = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Does one task and returns its measurements; both are plain data."""


class BenchmarkError(Exception):
    """The measurement can't be taken; the message is one sentence that names the culprit."""


@dataclass(frozen=True)
class Contender:
    """One program to measure.

    Attributes:
        name: What tables call it.
        make: Called once, in the contender's process, with `arguments`; loads what is needed and returns the `Work`.
            A function of a module, so that another process can find it.
        arguments: Plain data.
    """

    name: str
    make: Callable[..., Work]
    arguments: tuple[Any, ...] = ()


class Process:
    """A started contender."""

    def __init__(self, contender: Contender) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = contender.name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, contender.make, contender.arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Raises BenchmarkError if the contender couldn't be made."""
        self._receive()

    def do(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Has one task done.

        Returns:
            The measurements, with `cpu_seconds` of the task and `idle_cpu_seconds` of the wait before it.

        Raises:
            BenchmarkError: The task failed, or the process died.
        """
        self._pipe.send(dict(task))
        return self._receive()

    def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._pipe.close()

    def _receive(self) -> dict[str, Any]:
        try:
            answer, problem = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise BenchmarkError(
                f"{self.name} died with exit status {self._process.exitcode}; it may have been out of memory"
            ) from None
        if problem is not None:
            raise BenchmarkError(f"{self.name} failed: {problem}")
        return answer


@contextlib.contextmanager
def started(contenders: Sequence[Contender]) -> Iterator[dict[str, Process]]:
    """Starts the contenders one after the other, and stops them at the end."""
    processes: dict[str, Process] = {}
    try:
        for contender in contenders:
            processes[contender.name] = Process(contender)
            processes[contender.name].wait_until_ready()
        yield processes
    finally:
        for process in processes.values():
            process.stop()


def take_turns(
    processes: Mapping[str, Process], task: Mapping[str, Any], turns: int
) -> dict[str, list[dict[str, Any]]]:
    """Gives every process the task `turns` times, after once unmeasured, each time in another order.

    Returns:
        The measurements of each turn by contender; the nth of two contenders were taken side by side.
    """
    for process in processes.values():
        process.do(task)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    names = list(processes)
    for turn in range(turns):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            results[name].append(processes[name].do(task))
    return results


def _serve(pipe: Connection, make: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    try:
        work = make(*arguments)
        pipe.send(({}, None))
        waiting_from = time.process_time()
        while (task := pipe.recv()) is not None:
            working_from = time.process_time()
            result = work(task)
            done = time.process_time()
            result |= {"cpu_seconds": done - working_from, "idle_cpu_seconds": working_from - waiting_from}
            pipe.send((result, None))
            waiting_from = time.process_time()
    except (EOFError, KeyboardInterrupt):  # the parent is gone or going, and speaks for both
        return
    except Exception as error:
        pipe.send((None, " ".join(str(error).split()) or type(error).__name__))
