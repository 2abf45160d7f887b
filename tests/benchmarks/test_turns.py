"""Contenders take turns in processes of their own, and whatever ends one is named."""

import time

import pytest

from benchmarks.turns import BenchmarkError, Contender, started, take_turns
from tests.benchmarks import contenders


def test_each_is_warmed_up_and_then_takes_every_turn_in_rotating_order(tmp_path):
    log = tmp_path / "log"
    group = [Contender(name, contenders.diary, (str(log), name)) for name in "ab"]
    with started(group) as processes:
        results = take_turns(processes, {"size": 3}, 3)
    assert log.read_text() == "ababbaab"
    assert {name: len(turns) for name, turns in results.items()} == {"a": 3, "b": 3}
    assert all(
        turn["name"] == name and turn["size"] == 3 for name, turns in results.items() for turn in turns
    )


def test_a_process_that_works_while_it_waits_is_seen():
    with started([Contender("spinner", contenders.busy_while_waiting, (0.3,))]) as processes:
        process = processes["spinner"]
        process.do({})
        time.sleep(1)
        assert process.do({})["idle_cpu_seconds"] > 0.2


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("made", "it failed: no such model"),
        ("working", "it failed: bad task"),
        ("dead", "it died with exit status 9; it may have been out of memory"),
    ],
)
def test_a_failure_names_the_contender(when, message):
    with (
        pytest.raises(BenchmarkError) as caught,
        started([Contender("it", contenders.broken, (when,))]) as processes,
    ):
        processes["it"].do({})
    assert str(caught.value) == message
