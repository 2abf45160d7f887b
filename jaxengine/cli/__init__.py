"""The `jaxengine` command: one module a command, text on standard output, everything else on standard error."""

from jaxengine.cli.main import main

__all__ = ["main"]
