"""A world of at most three requests, four blocks and two places, small enough to see all of it: what can be done in a
state, what of a state decides its future, and what must hold in each.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

import jaxengine as je
from jaxengine import failures
from jaxengine.state import STEPS
from jaxengine.toy import CHANNELS, LETTERS, next_token, number, toy_model, weight
from tests.jaxengine.harness import tokens_of
from tests.jaxengine.naive import LIVE, NaiveEngine, NaiveRequest

MODEL = toy_model()
MOST_REQUESTS = 3
SESSION, GENERATED, PROMPTS = 7, 2, (1, 4)
"""Two requests that began with four tokens need six blocks before they are done."""


def small(**changes: object) -> je.EngineConfig:
    """Its limits."""
    sizes = {"max_batch_size": 2, "max_scheduled_tokens": 3, "num_blocks": 4, "block_size": 2}
    return je.EngineConfig(**sizes, fairness_bound=2, max_row_retries=0, **changes)


def prompt(request_id: int, start: int, count: int) -> list[int]:
    """Tokens that differ from request to request and from turn to turn."""
    return [(5 * request_id + 3 * start + i) % LETTERS for i in range(count)]


def key(state: je.EngineState) -> tuple:
    """What of a state decides its future, the same for states that differ in names and counts alone.

    Ids, turns, blocks and places are names: only their number and who has them counts. Ranks and times matter by their
    order, and waiting up to the bound. What tokens there are decides nothing here, since no token ends a turn.
    """
    control = state.control
    requests = control.requests
    bound, now = control.config.fairness_bound, int(control.counters[STEPS])
    undrained = {event.request_id for event in control.events}
    live = np.isin(requests.status, LIVE)
    resident = requests.place >= 0
    times = sorted({*requests.served[live].tolist(), *requests.queued[resident].tolist()})
    by_submission = np.argsort(np.argsort(np.where(live, requests.submitted, 0))).tolist()
    by_residence = np.argsort(np.argsort(requests.order)).tolist()
    found = []
    for row in range(len(requests)):
        residence: tuple = ()
        if resident[row]:
            settled = int(requests.settled[row])
            residence = (
                by_residence[row],
                times.index(requests.queued[row]),
                -1 if settled < 0 else min(now - settled, bound),
            )
        turn: tuple = ()
        if live[row]:
            turn = (
                bool(requests.processed[row] < requests.input_end[row]),
                int(requests.max_generated[row] - requests.generated[row]),
                min(now - int(requests.served[row]), bound),
                times.index(requests.served[row]),
                by_submission[row],
                int(requests.failures[row]),
            )
        found.append(
            (
                int(requests.status[row]),
                int(requests.turn[row]),
                int(requests.length[row]),
                int(requests.processed[row]),
                int(control.blocks_held[row]),
                int(requests.id[row]) in undrained,
                residence,
                turn,
                tuple(i for i, group in enumerate(control.suspects) if requests.id[row] in group),
            )
        )
    return (control.failure is not None, () in control.suspects, *sorted(found))


def commands(state: je.EngineState, most_turns: int) -> Iterator[tuple[str, je.EngineState]]:
    """Every command but a step, and the state that it leads to.

    A request begins at most `most_turns` turns, and no second one is created before the first has begun.
    """
    control = state.control
    requests = control.requests
    healthy = control.failure is None
    if healthy and len(requests) < MOST_REQUESTS and 0 not in requests.status:
        yield "create", je.create_request(state, je.RequestOptions(max_session_tokens=SESSION))[0]
    if control.events:
        yield "drain", je.drain(state, len(control.events))[0]
    for row, request_id in enumerate(requests.id.tolist()):
        yield f"close {request_id}", je.close_request(state, request_id)
        if requests.turn[row]:
            after, cancelled = je.cancel_turn(state, request_id, int(requests.turn[row]))
            if cancelled:
                yield f"cancel {request_id}", after
        for count in PROMPTS if requests.turn[row] < most_turns else ():
            tokens = prompt(request_id, int(requests.length[row]), count)
            options = je.TurnOptions(GENERATED)
            live = requests.status[row] in LIVE
            undrained = any(event.request_id == request_id for event in control.events)
            long = requests.length[row] + count >= SESSION
            if healthy and not (live or undrained or long):
                yield f"begin {request_id} {count}", je.begin_turn(state, request_id, tokens, options)[0]
            else:
                with pytest.raises((je.RequestStateError, je.EngineError, ValueError)):
                    je.begin_turn(state, request_id, tokens, options)


def take_step(
    state: je.EngineState, transaction: je.Transaction | None = None
) -> tuple[je.EngineState, Exception | None]:
    """What `Engine` makes of a state in one step, and the error if the step failed; the state stays usable.

    With a transaction that was executed from the state the step begins at its commit.
    """
    plan = None
    try:
        plan = je.plan_step(state)
        if plan.outcome is je.StepOutcome.NO_WORK:
            return state, None
        if plan.outcome is je.StepOutcome.CAPACITY_DEFERRED:
            return failures.after_blocked(state, plan), None
        if transaction is None:
            transaction = je.execute(MODEL, state, plan)
        return je.commit(state, transaction, donate=False)[0], None
    except je.StepError as error:
        return failures.after_failure(state, [] if plan is None else plan.request_ids.tolist(), error), error
    except (MemoryError, RuntimeError) as error:
        return state, error


def image(state: je.EngineState) -> tuple:
    """A copy of all that a state holds, to be compared with a later one."""
    control = state.control
    rows = range(len(control.requests))
    return (
        tuple(
            tuple(column) if column.dtype == object else column.tobytes()
            for column in jax.tree.leaves(control.requests)
        ),
        tuple(control.tokens.read(row, 0, int(control.tokens.lengths[row])).tobytes() for row in rows),
        tuple(control.blocks.read(row, 0, int(control.blocks_held[row])).tobytes() for row in rows),
        control.free_blocks.tobytes(),
        control.counters.tobytes(),
        control.events,
        control.suspects,
        control.failure,
        *(np.array(array).tobytes() for array in (*state.store.pages, state.store.block_table)),
    )


def check_store(state: je.EngineState) -> None:
    """Each committed slot holds the key and value of its token, at its position, and the device knows the table."""
    control = state.control
    pages, table = np.asarray(state.store.pages[0]), np.asarray(state.store.block_table)
    for row in range(len(control.requests)):
        processed = int(control.requests.processed[row])
        if processed == 0:
            continue
        columns = -(-processed // control.config.block_size)
        held = control.blocks.read(row, 0, columns)
        assert table[control.requests.place[row], :columns].tolist() == held.tolist()
        tokens = control.tokens.read(row, 0, processed).tolist()
        slots = pages[held].transpose(0, 3, 1, 2, 4).reshape(-1, 2, pages.shape[-1])[:processed]
        assert np.round(np.exp(slots[:, 0, 0])).tolist() == [weight(t, p) for p, t in enumerate(tokens)]
        for channel in range(CHANNELS):
            expected = [number(t, p, channel) - 1 for p, t in enumerate(tokens)]
            assert slots[:, 1, channel].tolist() == expected


def check_tokens(before: je.EngineState, after: je.EngineState) -> None:
    """What a step has published are the tokens that follow each sequence, and none is lost."""
    for event in after.control.events[len(before.control.events) :]:
        if event.flags & je.EngineEventFlags.TOKEN:
            assert event.token == next_token(tokens_of(before, event.request_id))
            assert tokens_of(after, event.request_id) == [*tokens_of(before, event.request_id), event.token]


def twin_of(state: je.EngineState) -> NaiveEngine:
    """The plain-Python twin in the same state, to plan the next step."""
    control = state.control
    twin = NaiveEngine(control.config)
    twin.steps = int(control.counters[STEPS])
    twin.suspects = [list(group) for group in control.suspects]
    for row, request_id in enumerate(control.requests.id.tolist()):
        request = NaiveRequest(request_id, SESSION, tokens_of(state, request_id))
        for name in ("processed", "input_end", "submitted", "served", "queued", "settled"):
            setattr(request, name, int(getattr(control.requests, name)[row]))
        request.settled = None if request.settled < 0 else request.settled
        request.status = je.RequestStatus(control.requests.status[row])
        request.rank = int(control.requests.order[row]) if control.requests.place[row] >= 0 else None
        request.blocks = int(control.blocks_held[row])
        twin.requests[request_id] = request
    return twin
