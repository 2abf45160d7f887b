"""Proposes drafts from a request's own text: what followed the last time that its newest tokens came up.

The method is known as prompt lookup or n-gram speculation. It needs no second model, and pays where text repeats
itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxengine.checks import check_fields, require_positive


@dataclasses.dataclass(frozen=True)
class NgramDrafts:
    """Asks for drafts by n-gram lookup.

    Attributes:
        most: Drafts a step, at most.
        longest: Newest tokens that are looked for; where so many are found nowhere, fewer, down to `shortest`.
        shortest: The fewest that are looked for.

    Raises:
        TypeError: A field is no integer.
        ValueError: A field is below 1, or `shortest` above `longest`.
    """

    most: int = 8
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        names = ("most", "longest", "shortest")
        check_fields(self, dict.fromkeys(names, require_positive), names)
        if self.shortest > self.longest:
            raise ValueError(
                f"NgramDrafts.shortest is {self.shortest}, above longest, which is {self.longest}; give at most that"
            )


def propose(proposer: NgramDrafts, tokens: np.ndarray, room: int) -> tuple[int, ...]:
    """Returns what followed the newest earlier place of the longest run that `tokens`, int32[n], end with.

    At most `room` drafts, whatever the proposer's own limit.
    """
    for size in range(min(proposer.longest, len(tokens) - 1), proposer.shortest - 1, -1):
        runs = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        places = np.flatnonzero((runs == tokens[len(tokens) - size :]).all(axis=1))
        if len(places):
            follows = int(places[-1]) + size
            # A repetition that has just begun is taken to go on: where the text ends, it follows from there again.
            nth = np.arange(min(proposer.most, room)) % (len(tokens) - follows)
            return tuple(tokens[follows + nth].tolist())
    return ()
