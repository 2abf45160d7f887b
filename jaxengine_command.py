"""The `jaxengine` command's way in: while the library still loads, Ctrl-C ends it in a line as it does later.

It stands beside the package because whatever is imported from inside loads all of it first.
"""

import sys


def main() -> int:
    """Runs the command and returns its exit status; see `jaxengine.cli.main`."""
    try:
        from jaxengine.cli import main as run
    except KeyboardInterrupt:
        print("\njaxengine: interrupted", file=sys.stderr)  # noqa: T201 (`say` is not there yet)
        return 130
    return run()
