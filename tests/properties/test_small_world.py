"""Every state that a small world can come to, breadth first, with every command and a fault at every stage: P2, and in
each state P1, E1, E2, E8, C11, F1 to F6, F8 and F9.

States that differ in names only are one (`small_world.key`), so the search ends. How many there are is pinned: whoever
changes the engine learns whether its states have changed too.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import jaxengine as je
from jaxengine import failures
from jaxengine.state import FAILED_STEPS
from tests.jaxengine.naive import LIVE
from tests.properties.small_world import (
    MODEL,
    check_store,
    check_tokens,
    commands,
    image,
    key,
    small,
    take_step,
    twin_of,
)

EXECUTABLE = (je.StepOutcome.COMMITTED, je.StepOutcome.UNSERVICEABLE_REQUEST)
OF_A_COMMIT = (je.Stage.VALIDATE, je.Stage.BOOKKEEPING, je.Stage.EVENTS, je.Stage.PUBLISH)
BEFORE_COMMIT = tuple(stage for stage in je.Stage if stage not in (je.Stage.PLAN, *OF_A_COMMIT))
ERRORS = (je.RetryableStepError("injected"), MemoryError("injected"), RuntimeError("injected"))


class Search:
    """Breadth first from the empty engine; `states` are keys in the order in which they were found."""

    def __init__(self, config, most_turns, every_fault):
        self.most_turns, self.every_fault = most_turns, every_fault
        self.states = {}
        self.successors = {}
        self.after_step = {}
        self.again = []
        self.transitions = self.faults = self.depth = 0
        self.frontier = []
        self.found(je.init_state(MODEL, config))

    def run(self, most_depth):
        while self.frontier and self.depth < most_depth:
            level, self.frontier = self.frontier, []
            for number, state in level:
                before = image(state)
                self.visit(number, state)
                assert image(state) == before
            self.depth += 1

    def found(self, state):
        """The number of a state; one that is new is checked, and visited later."""
        je.check_invariants(state)
        name = key(state)
        if name not in self.states:
            self.states[name] = len(self.states)
            self.frontier.append((self.states[name], state))
            check_store(state)
        elif self.transitions % 50 == 0:
            self.again.append(state)
        return self.states[name]

    def visit(self, number, state):
        plan = transaction = None
        if state.control.failure is None:
            plan = je.plan_step(state)
            check_plan(state, plan)
            if plan.outcome in EXECUTABLE:
                transaction = je.execute(MODEL, state, plan)
        following = set()
        for label, after in self.moves(state, plan, transaction):
            self.transitions += 1
            following.add(self.found(after))
            if label == "step":
                check_tokens(state, after)
                assert suspects(after).isdisjoint(plan.request_ids.tolist())
                self.after_step[number] = self.found(after)
        self.successors[number] = following - {number}
        if plan is not None:
            self.fail_everywhere(state, plan, transaction)

    def moves(self, state, plan, transaction):
        yield from commands(state, self.most_turns)
        if plan is None:
            return
        yield "step", take_step(state, fresh(transaction))[0]
        ids = plan.request_ids.tolist()
        for request_id in plan.request_ids[plan.samples].tolist():
            error = je.RetryableStepError("not finite", (request_id,))
            yield f"bad logits of {request_id}", failures.after_failure(state, ids, error)
        if ids:
            yield "unknown error", failures.after_failure(state, ids, je.ExecutionError("unknown"))

    def fail_everywhere(self, state, plan, transaction):
        """A fault at each stage that a step of this state comes to; `every_fault` or one kind after the other."""
        stages = [je.Stage.PLAN]
        if transaction is not None:
            stages += (*(BEFORE_COMMIT if len(plan.index) else ()), *OF_A_COMMIT)
        for stage in stages:
            for error in ERRORS if self.every_fault else ERRORS[self.faults % 3 :][:1]:
                self.faults += 1
                with je.inject_fault(stage, error) as fault:
                    after, raised = take_step(state, fresh(transaction) if stage in OF_A_COMMIT else None)
                assert fault.fired
                assert raised is not None
                check_failed_step(state, plan, stage, error, after)
                if after.control.requests is not state.control.requests:
                    self.found(after)


def fresh(transaction):
    """The same transaction, not committed yet."""
    return transaction and dataclasses.replace(transaction, fate=type(transaction.fate)())


def suspects(state):
    return set(itertools.chain.from_iterable(state.control.suspects))


def check_plan(state, plan):
    """The twin's plan; nobody is put off for ever by requests that could give way."""
    expected = twin_of(state).plan()
    assert plan.deferred == expected.deferred
    assert plan.evicted.tolist() == [request.id for request in expected.evicted]
    assert plan.unserviceable.tolist() == [request.id for request in expected.hopeless]
    assert [(row.request_id, row.num_tokens, len(row.block_ids)) for row in plan.rows] == [
        (row.request.id, row.count, row.new_blocks) for row in expected.rows
    ]
    requests = state.control.requests
    if state.control.config.preemption == "recompute" and plan.outcome is je.StepOutcome.CAPACITY_DEFERRED:
        assert ((requests.place >= 0) & ~np.isin(requests.status, LIVE)).any()


def cost(control, plan, stage, error):
    """What a failure of a step costs whose state stays: "nothing", "more tries", "one" request or "all"."""
    if isinstance(error, je.RetryableStepError | MemoryError):
        return "nothing"
    if stage is je.Stage.RESERVE or control.config.failure_policy == "stop":
        return "all"
    if len(plan.index) == 0:
        return "all" if () in control.suspects else "more tries"
    known = bool(control.suspects) and set(plan.request_ids.tolist()) <= set(control.suspects[0])
    return "one" if known and len(plan.index) == 1 else "more tries"


def check_failed_step(state, plan, stage, error, after):
    """F1 to F5, F9: a failed step has changed nothing but what it says."""
    before, now = state.control, after.control
    if stage is je.Stage.PLAN and not isinstance(error, je.RetryableStepError):
        assert after is state
        return
    for name in ("tokens", "blocks", "free_blocks", "config", "facts"):
        assert getattr(now, name) is getattr(before, name)
    assert after.store.pages == state.store.pages
    assert after.store.block_table is state.store.block_table
    assert not any(array.is_deleted() for array in (*state.store.pages, state.store.block_table))
    assert np.flatnonzero(now.counters != before.counters).tolist() == [FAILED_STEPS]

    assert now.events[: len(before.events)] == before.events
    said = now.events[len(before.events) :]
    told = [event.request_id for event in said if event.request_id]
    assert all(event.finish_reason is je.FinishReason.FAILED for event in said if event.request_id)
    what = cost(before, plan, stage, error)
    if what == "nothing":
        assert now.requests is before.requests
        assert now.suspects == before.suspects
        assert len(said) == 1
        assert said[0].flags == (
            je.EngineEventFlags.CAPACITY_BLOCKED
            if isinstance(error, MemoryError)
            else je.EngineEventFlags.RETRYABLE
        )
    if what == "more tries":
        assert suspects(after) >= set(plan.request_ids.tolist())
    live = np.isin(before.requests.status, LIVE)
    ended = {"all": before.requests.id[live].tolist(), "one": plan.request_ids.tolist()}.get(what, [])
    assert told == ended
    rows = np.isin(before.requests.id, ended)
    for field in dataclasses.fields(now.requests):
        old, new = getattr(before.requests, field.name), getattr(now.requests, field.name)
        if field.name != "stamp":
            assert (new[~rows] == old[~rows]).all()
            assert field.name in ("status", "undrained") or (new == old).all()
    assert (now.requests.status[rows] == je.RequestStatus.TURN_COMPLETE).all()
    assert (now.failure is not None) == (what == "all")
    assert len(said) == len(told) + (what != "all" or not told)


def check_the_names(search):
    """States of one name go on alike: a sample of those that were met again lead where the first one led."""
    assert search.again
    expected, again = dict(search.successors), search.again[:]
    for state in again:
        number = search.found(state)
        if number in expected:
            search.visit(number, state)
            assert search.successors[number] == expected[number]


def check_that_steps_come_to_an_end(search):
    """C11: from no state do steps alone go round in a circle: requests would hinder each other for ever."""
    settled = set()
    for start in search.after_step:
        path, number = [], start
        while number in search.after_step and number not in settled and search.after_step[number] != number:
            assert number not in path
            path.append(number)
            number = search.after_step[number]
        settled |= {number, *path}


WORLDS = {
    # Settings and turns of a request; depth and states of the short search; depth and states of the thorough one.
    "stop": ({}, 1, (10, 3045), (18, 22135)),
    "no preemption": ({"preemption": "none"}, 1, (8, 841), (99, 14394)),  # closed at depth 24
    "isolate": ({"failure_policy": "isolate"}, 1, (8, 1174), (12, 12616)),
    "two turns": ({}, 2, (8, 1026), (12, 22132)),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_P2_every_state_of_a_small_world_keeps_every_invariant(world, thorough):
    changes, most_turns, short, full = WORLDS[world]
    depth, states = full if thorough else short
    search = Search(small(**changes), most_turns, every_fault=thorough)
    search.run(depth)
    print(
        f"{world}: {len(search.states)} states, {search.transitions} transitions, {search.faults} faults, "
        f"depth {search.depth}, {'closed' if not search.frontier else 'not closed'}"
    )
    assert len(search.states) == states
    check_the_names(search)
    check_that_steps_come_to_an_end(search)
