"""Scheduling policies: in which order the candidates of a step are considered.

A policy is a pure function from `Candidates` to a permutation of them. It only ranks: what fits is decided by the
planner, which skips what doesn't, and which serves whoever would else wait for more than `EngineConfig.fairness_bound`
steps before anyone else, whatever the policy says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Candidates(NamedTuple):
    """The queued and active requests of a state, one entry each, in order of creation.

    Attributes:
        request_ids: uint64[n].
        is_resident: bool[n], whether it has a place in the block table.
        is_prefill: bool[n], whether its unprocessed tokens are input; else it decodes.
        rank: int64[n], order of admission among residents and of submission among the others.
        num_unprocessed: int64[n], tokens that it still has to run.
        waited: int64[n], steps that others were served since it was last served or queued.
    """

    request_ids: np.ndarray
    is_resident: np.ndarray
    is_prefill: np.ndarray
    rank: np.ndarray
    num_unprocessed: np.ndarray
    waited: np.ndarray


SchedulingPolicy = Callable[[Candidates], np.ndarray]
"""Returns int[n], the candidates' indices in the order in which they are considered."""


def decode_first(candidates: Candidates) -> np.ndarray:
    """Decodes in order of residence, then prefills of residents, then waiting requests in order of submission."""
    return np.lexsort((candidates.rank, ~candidates.is_resident, candidates.is_prefill))
