"""A kernel of which a report can be made: a name, a function, and the shapes of its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Registered:
    """`function` takes pytrees of arrays of `shapes` and calls one kernel or more."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]
