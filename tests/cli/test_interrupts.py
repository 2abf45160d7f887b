"""T2: Ctrl-C ends the command in a line from its first moment, while the library still loads."""

import subprocess
import sys
import tomllib

import pytest

from tests.cli.conftest import ROOT

COMMAND = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["jaxengine"]
MODULE, FUNCTION = COMMAND.split(":")


def run_script(before: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What an installed script does, with `before` in front."""
    program = f"{before}\nfrom {MODULE} import {FUNCTION}\nraise SystemExit({FUNCTION}())"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("module", ["jaxengine", "jax", "numpy", "jaxengine.engine", "jaxengine.cli.main"])
def test_T2_ctrl_c_while_the_library_loads_is_one_line(module):
    """The signal comes in the middle of an import, which is where most of the first second goes."""
    done = run_script(
        f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
""",
        "--version",
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\njaxengine: interrupted\n")


def test_T1_the_script_runs_the_command():
    done = run_script("", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jaxengine ")
    assert run_script("", "dance").returncode == 2
