"""The programs in examples/ run, on a small folder and on the demo model that a reader gets."""

import os
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT

SMALL = ROOT / "tests" / "fixtures" / "models" / "cpu-fp32" / "qwen3"


def run(example, *arguments):
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def check_engine(out):
    """The second request joins while the first still runs, and both end."""
    lines = out.splitlines()
    second = next(place for place, line in enumerate(lines) if "request 2" in line)
    assert [line for line in lines[:second] if "request 1" in line]
    assert [line for line in lines[second:] if "request 1" in line]
    assert sum("ended by" in line for line in lines) == 2


def check_core(out):
    assert "old state: this state was spent by a commit" in out
    assert "text: " in out


@pytest.mark.parametrize(
    ("example", "check"), [("engine.py", check_engine), ("functional_core.py", check_core)]
)
def test_an_example_runs_on_a_small_folder(example, check):
    check(run(example, SMALL))


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "check"), [("engine.py", check_engine), ("functional_core.py", check_core)]
)
def test_an_example_runs_on_the_demo_model(example, check, demo_folder):
    out = run(example)
    check(out)
    assert "Paris" in out
