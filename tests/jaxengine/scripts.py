"""Scripts of commands that drive the toy model step by step, and what of a store its state may read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np

import jaxengine as je
from jaxengine.toy import LETTERS, toy_model
from jaxengine.windows import ring_of
from tests.jaxengine.harness import SMALL
from tests.pallas_kernels.ragged import from_pages

MODEL = toy_model()
GREEDY = je.SamplingParams(temperature=0.0)
SAMPLED = je.SamplingParams(temperature=1.5, top_k=9, seed=7)

Command = tuple[Any, ...]
commands = st.lists(
    st.one_of(
        st.tuples(
            st.just("new"), st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20), st.booleans()
        ),
        st.tuples(
            st.just("continue"),
            st.integers(0, 3),
            st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=7),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("drain")),
        *[st.tuples(st.just("step"))] * 4,
    ),
    min_size=8,
    max_size=24,
)


def begin(
    state: je.EngineState, tokens: Sequence[int], most: int = 6, sampling: je.SamplingParams = GREEDY
) -> tuple[je.EngineState, int]:
    """A new request with its first turn queued."""
    state, request_id = je.create_request(state, je.RequestOptions(sampling=sampling))
    state, _ = je.begin_turn(state, request_id, tokens, je.TurnOptions(max_generated_tokens=most))
    return state, request_id


def apply(state: je.EngineState, command: Command) -> je.EngineState:
    """Any command but "step"; one that the state does not allow changes nothing."""
    ids = state.control.requests.id.tolist()
    match command:
        case ("new", tokens, sampled):
            return begin(state, tokens, sampling=SAMPLED if sampled else GREEDY)[0]
        case ("continue", nth, tokens) if nth < len(ids):
            try:
                return je.begin_turn(state, ids[nth], tokens, je.TurnOptions(max_generated_tokens=5))[0]
            except (je.RequestStateError, ValueError):
                return state
        case ("cancel", nth) if nth < len(ids) and state.control.requests.turn[nth]:
            return je.cancel_turn(state, ids[nth], int(state.control.requests.turn[nth]))[0]
        case ("close", nth) if nth < len(ids):
            return je.close_request(state, ids[nth])
        case ("drain",):
            return je.drain(state, 100)[0]
    return state


def executable(state: je.EngineState) -> je.StepPlan | None:
    """The state's plan if it can be executed."""
    plan = je.plan_step(state)
    return plan if plan.outcome in (je.StepOutcome.COMMITTED, je.StepOutcome.UNSERVICEABLE_REQUEST) else None


def steps(
    script: list[Command], model: je.Model = MODEL, config: je.EngineConfig = SMALL
) -> Iterator[tuple[je.EngineState, je.StepPlan, list[je.EngineState]]]:
    """Plays a script; at each step yields the state, its plan and a list that must receive the next state."""
    state = je.init_state(model, config)
    for command in [*script, *[("step",)] * 6]:
        if command != ("step",):
            state = apply(state, command)
        elif (plan := executable(state)) is not None:
            answer: list[je.EngineState] = []
            yield state, plan, answer
            (state,) = answer
        je.check_invariants(state)


def readable(state: je.EngineState, rows: je.EngineState, window: int = 0) -> list[np.ndarray]:
    """Copies of each slot of `state`'s store that the requests of `rows` may read, and of their table's entries.

    Of a ring these are the last `window` - 1 committed positions.
    """
    size = rows.control.config.block_size
    found = []
    for row in range(len(rows.control.requests)):
        processed = int(rows.control.requests.processed[row])
        columns = -(-processed // size)
        held = rows.control.blocks.read(row, 0, columns)
        place = int(rows.control.requests.place[row])
        for pages in state.store.pages:
            ring = ring_of(pages)
            values = from_pages(np.array(pages if ring is None else pages[place], copy=True))
            if ring is None:
                values = values[held].reshape(-1, *values.shape[2:])[:processed]
            else:
                seen = np.arange(max(0, processed - window + 1), processed)
                values = values[seen // size % ring, seen % size]
            found.append(values)
        if place >= 0:
            found.append(np.array(state.store.block_table, copy=True)[place, :columns])
    return found


def with_own_store(state: je.EngineState) -> je.EngineState:
    """The same state over a store of its own."""
    store = state.store
    copied = jax.tree.map(lambda array: jax.numpy.array(array, copy=True), store)
    return state.replace(store=copied.replace(lease=type(store.lease)()))
