"""The command line's frame: it parses, runs one command, and turns whatever ends it into a sentence and a status."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from jaxengine.cli import chat, generate, inspect, verify
from jaxengine.cli.errors import BROKEN_PIPE, FAILURE, INTERRUPTED, USAGE, CommandError
from jaxengine.cli.options import in_words_of_options
from jaxengine.cli.output import say
from jaxengine.demo import DemoModelError
from jaxengine.errors import EngineError
from jaxengine.text import TextError
from onnx_import import ImportFailure

COMMANDS = (generate, chat, inspect, verify)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence, without the usage text in front."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)", USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxengine", description="Run language models of the ONNX Runtime GenAI builder in JAX."
    )
    parser.add_argument("--version", action="version", version=f"jaxengine {metadata.version('jaxengine')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `jaxengine` command.

    Args:
        argv: The words after the command's name; None takes the process's own.

    Returns:
        The exit status: 0; 2 for wrong options; 130 where Ctrl-C ended it; 141 where nobody reads the output; else 1.
    """
    if sys.stderr is None:  # closed by the caller, who then hears of an error by the status only
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? and the command goes on
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"jaxengine: warning: {in_words_of_options(message)}")
        try:
            if sys.stdout is None:
                raise CommandError("standard output is closed; give the text somewhere to go")
            arguments = _parser().parse_args(argv)
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
        except SystemExit as stop:  # argparse, after --help and --version
            return stop.code if isinstance(stop.code, int) else 0
        except BrokenPipeError:
            _give_up_output()
            return BROKEN_PIPE
        except OSError as error:  # a full disk behind standard output, for one
            _give_up_output()
            say(f"jaxengine: error: {error}")
            return FAILURE
        except KeyboardInterrupt:
            say("\njaxengine: interrupted")
            return INTERRUPTED
        except CommandError as error:
            say(f"jaxengine: error: {error}")
            return error.status
        except (ImportFailure, TextError, DemoModelError, EngineError) as error:
            say(f"jaxengine: error: {error}")
            return FAILURE


def _give_up_output() -> None:
    """Sends standard output nowhere: the interpreter flushes it once more at its end, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
