"""The loops of a kernel's machine code, found in what nvdisasm prints.

A loop is a natural one: a jump back to a block that every way to the jump passes, and all blocks from which the jump
is reached without passing that block again (Aho, Lam, Sethi and Ullman, Compilers, 9.6). Order in the text wouldn't
do, since ptxas moves what waits for barriers to the end of the kernel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tests.hopper.instructions import Kind, kind_of_sass

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)(?P<rest>[^;]*);")
_LABEL = re.compile(r"(\.L_[\w.]+):")
_TARGET = re.compile(r"`\((\.L_[\w.]+)\)")
_LEAVES = {"EXIT", "RET", "KILL"}
_JUMPS = {"BRA", "JMP", "BRX", "JMX", "CALL"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One machine instruction: its name with modifiers, whether a predicate guards it, where it may jump."""

    name: str
    guarded: bool
    target: str | None

    @property
    def opcode(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Code:
    """Instructions in order, and the place of each label among them."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


def parse(sass: str) -> Code:
    """Reads what `nvdisasm -c` prints of one kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            target = _TARGET.search(found["rest"])
            # `BRA.U UP0, …` and `BRA.DIV …` name their condition among the operands.
            guarded = bool(found["guard"]) or bool(re.match(r"\s*!?U?P\w+\s*,|\s*U?R\w+\s*,", found["rest"]))
            instructions.append(Instruction(found["name"], guarded, target[1] if target else None))
    return Code(tuple(instructions), labels)


def innermost_loops(code: Code, kind: Kind) -> list[tuple[str, ...]]:
    """The names of the instructions of each loop that holds one of `kind` and no smaller loop that does."""
    blocks, successors = _graph(code)
    holding = []
    for loop in _natural_loops(successors):
        names = tuple(code.instructions[at].name for block in sorted(loop) for at in blocks[block])
        if any(kind_of_sass(name) == kind for name in names):
            holding.append((loop, names))
    return [names for loop, names in holding if not any(other < loop for other, _ in holding)]


def _graph(code: Code) -> tuple[list[range], list[set[int]]]:
    """Basic blocks as ranges of instructions, and the blocks that may follow each."""
    count = len(code.instructions)
    starts = {0, *(at for at in code.labels.values() if at < count)}
    starts |= {at + 1 for at, one in enumerate(code.instructions[:-1]) if one.opcode in _LEAVES | _JUMPS}
    ordered = sorted(starts)
    blocks = [
        range(start, end) for start, end in zip(ordered, [*ordered[1:], count], strict=True) if start < end
    ]
    block_at = {block.start: index for index, block in enumerate(blocks)}
    successors: list[set[int]] = []
    for index, block in enumerate(blocks):
        last = code.instructions[block[-1]]
        follows: set[int] = set()
        if last.opcode in _JUMPS and last.target is not None and code.labels[last.target] in block_at:
            follows.add(block_at[code.labels[last.target]])
        ends = last.opcode in _LEAVES or (last.opcode in _JUMPS and last.opcode != "CALL")
        if (last.guarded or not ends) and index + 1 < len(blocks):
            follows.add(index + 1)
        successors.append(follows)
    return blocks, successors


def _natural_loops(successors: Sequence[set[int]]) -> list[frozenset[int]]:
    """The blocks of each natural loop; loops with one header count as one."""
    if not successors:
        return []
    predecessors: list[set[int]] = [set() for _ in successors]
    for block, follows in enumerate(successors):
        for follower in follows:
            predecessors[follower].add(block)
    dominators = _dominators(successors, predecessors)
    loops: dict[int, set[int]] = {}
    for block, follows in enumerate(successors):
        for header in follows & dominators[block]:
            body = loops.setdefault(header, {header})
            pending = [block]
            while pending:
                if (inner := pending.pop()) not in body:
                    body.add(inner)
                    pending.extend(predecessors[inner])
    return [frozenset(body) for body in loops.values()]


def _dominators(successors: Sequence[set[int]], predecessors: Sequence[set[int]]) -> list[set[int]]:
    """For each block those on every way to it from block 0, itself included; none for what isn't reached."""
    reached, pending = {0}, [0]
    while pending:
        new = successors[pending.pop()] - reached
        reached |= new
        pending.extend(new)
    dominators = [set(reached) if block in reached else set() for block in range(len(successors))]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            ways = [dominators[before] for before in predecessors[block] if before in reached]
            now = {block} | set.intersection(*ways)
            changed |= now != dominators[block]
            dominators[block] = now
    return dominators
