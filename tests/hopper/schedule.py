"""The order in which a compiled program starts and awaits its work, read from its scheduled HLO text."""

from __future__ import annotations

import dataclasses
import re

_LINE = re.compile(
    r"\s+(?:ROOT )?%(?P<name>[\w.-]+) = .*?(?<=[\s)])(?P<opcode>[a-z][\w-]*)\((?P<operands>[^)]*)\)"
)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """One instruction of the entry computation, and the names of its operands."""

    name: str
    opcode: str
    operands: tuple[str, ...]


def schedule(hlo: str) -> tuple[Scheduled, ...]:
    """The entry computation in order of execution; raises ValueError if the text isn't scheduled."""
    if "is_scheduled=true" not in hlo:
        raise ValueError("the order in this HLO text means nothing; pass the text of a compiled program")
    _, _, entry = hlo.partition("\nENTRY ")
    found = []
    for line in entry[: entry.index("\n}")].splitlines():
        if match := _LINE.match(line):
            operands = re.findall(r"%([\w.-]+)", match["operands"])
            found.append(Scheduled(match["name"], match["opcode"], tuple(operands)))
    return tuple(found)
