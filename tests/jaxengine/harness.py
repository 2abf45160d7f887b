"""What most engine tests share: one small shape, states begun and finished in a line, states compared exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxengine as je
from jaxengine.requests import has_pending_work
from jaxengine.state import row_of

SMALL = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=16, block_size=4)
"""The shape most tests share, so that it is compiled once."""


def leaves(state: je.EngineState) -> list[Any]:
    """Every leaf and every piece of metadata of a state, copied, for comparing states exactly."""
    control = state.control
    arrays = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(state)]
    return [*arrays, control.events, control.suspects, control.failure, control.config, control.facts]


def assert_same(before: list[Any], after: list[Any]) -> None:
    """Fails unless two results of `leaves` are equal, dtypes included."""
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        else:
            assert one == other


def begun(
    model: je.Model, *prompts: Sequence[int], limit: int = 0, config: je.EngineConfig = SMALL
) -> je.EngineState:
    """A state whose requests 1, 2, … have each begun a turn with one of `prompts`."""
    state = je.init_state(model, config)
    for prompt in prompts:
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(limit))
    return state


def finish(model: je.Model, state: je.EngineState) -> tuple[je.EngineState, list[je.EventRecord]]:
    """Steps until nothing is left to run, checking the invariants; returns the state and all events, drained."""
    state, events = je.drain(state, len(state.control.events))
    drained = list(events)
    while has_pending_work(state):
        before = state
        state, events = je.step(model, state)
        assert state is not before, "every request waits for capacity"
        je.check_invariants(state)
        state, events = je.drain(state, len(events))
        drained += events
    return state, drained


def tokens_of(state: je.EngineState, request_id: int) -> list[int]:
    """A request's sequence."""
    row = row_of(state.control, request_id)
    return state.control.tokens.read(row, 0, int(state.control.requests.length[row])).tolist()


def column(state: je.EngineState, request_id: int, name: str) -> int:
    """A request's entry in a control column."""
    return int(getattr(state.control.requests, name)[row_of(state.control, request_id)])
