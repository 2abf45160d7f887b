"""Checks of single values at the border: each returns a plain value, or raises one sentence that names the culprit."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args


def require_int(label: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    """Returns `value` as an int; raises TypeError if it is none, ValueError outside [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{label} is {value!r}; give an integer")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{label} is {number}; give a value from {low} to {high}")
    return number


def require_number(label: str, value: object, low: float, high: float) -> float:
    """Returns `value` as a float; raises TypeError if it is no number, ValueError outside [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{label} is {value!r}; give a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if not low <= number <= high:
        raise ValueError(f"{label} is {number}; give a finite value from {low} to {high}")
    return number


def require_bool(label: str, value: object) -> bool:
    """Returns `value`; raises TypeError if it is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{label} is {value!r}; give True or False")
    return value


def require_positive(label: str, value: object) -> int:
    """Returns `value` as an int from 1 to 2**31 - 1; raises as `require_int` does."""
    return require_int(label, value, 1)


def require_count(label: str, value: object) -> int:
    """Returns `value` as an int.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    return require_int(label, value, 0, 2**63 - 1)


Check = Callable[[str, Any], Any]


def check_fields(options: object, checks: Mapping[str, Check], required: Collection[str] = ()) -> None:
    """Checks the named fields, those not required only if they are set, and keeps plain numbers in place of NumPy's."""
    for name, check in checks.items():
        value = getattr(options, name)
        if value is not None or name in required:
            object.__setattr__(options, name, check(f"{type(options).__name__}.{name}", value))


def one_of(kind: Any) -> Check:
    """A check that a value is one of the strings of a `Literal`."""
    names = get_args(kind)

    def check(label: str, value: object) -> object:
        if not isinstance(value, str) or value not in names:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{label} is {value!r}; give one of {', '.join(map(repr, names))}")
        return value

    return check


def instance_of(kind: type, remedy: str) -> Check:
    """A check that a value is of a class; the error says to give `remedy`."""

    def check(label: str, value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError(f"{label} is {value!r}; give {remedy}")
        return value

    return check
