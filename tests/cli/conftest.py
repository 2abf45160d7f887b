"""A tiny chat model for the command, and the command as a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_tiny_folder

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


# Where the tests themselves were started in the background, their children would inherit that Ctrl-C is ignored.
AS_FROM_A_SHELL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "jaxengine.cli", *sys.argv[1:]])
"""


@pytest.fixture
def start():
    """Starts the command with pipes; what still runs at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", AS_FROM_A_SHELL, *map(str, words)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
