"""Draining takes events off the queue and touches nothing else, whichever way it is asked (B2, B7, B10, A4)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.requests import has_undrained
from tests.jaxengine.harness import SMALL, assert_same, leaves
from tests.jaxengine.scripts import MODEL, commands, steps


def without_queue(state):
    """Every leaf but the queue, and what each request has in it."""
    requests = state.control.requests.replace(undrained=0 * state.control.requests.undrained)
    return leaves(state.replace(control=state.control.replace(events=(), requests=requests)))


def drained_by_hand(events, count, request_id):
    """The plain rule: of the events that may be taken, the first `count`; the others stay as they were."""
    taken, left = [], []
    for event in events:
        mine = request_id is None or event.request_id in (request_id, 0)
        (taken if mine and len(taken) < count else left).append(event)
    return taken, left


@given(script=commands, count=st.integers(0, 9))
@settings(max_examples=25)
def test_B2_B7_draining_in_any_state_changes_the_queue_alone(script, count):
    for state, plan, answer in steps(script):
        before, rest = leaves(state), without_queue(state)
        for request_id in (None, *state.control.requests.id.tolist()):
            taken, left = drained_by_hand(state.control.events, count, request_id)
            after, events = je.drain(state, count, request_id)
            assert (list(events), list(after.control.events)) == (taken, left)
            assert_same(rest, without_queue(after))
            assert after.store is state.store
            assert (after is state) == (not events)
            je.check_invariants(after)
        assert_same(before, leaves(state))
        answer.append(je.commit(state, je.execute(MODEL, state, plan))[0])


@given(script=commands, count=st.integers(0, 9))
@settings(max_examples=15)
def test_B7_B10_D4_a_step_commits_the_same_whether_or_not_the_queue_is_drained_meanwhile(script, count):
    """And it appends: what waited stays in front, what it returns is what it appended."""
    for state, plan, answer in steps(script):
        transaction = je.execute(MODEL, state, plan)
        kept, _ = je.commit(state, je.execute(MODEL, state, plan), donate=False)
        drained, taken = je.drain(state, count)
        new, events = je.commit(drained, transaction)
        assert new.control.events == drained.control.events + events
        assert taken + new.control.events == kept.control.events
        assert_same(without_queue(kept), without_queue(new))
        later, first = je.drain(new, len(new.control.events))
        assert first == drained.control.events + events
        assert later.control.events == ()
        answer.append(new)


@given(script=commands)
@settings(max_examples=15)
def test_A4_B10_undrained_is_what_the_queue_says(script):
    for state, plan, answer in steps(script):
        for request_id in state.control.requests.id.tolist():
            waiting = [event for event in state.control.events if event.request_id == request_id]
            assert has_undrained(state, request_id) == bool(waiting)
            everything = len(state.control.events)
            gone, _ = je.drain(state, everything, request_id)
            assert not has_undrained(gone, request_id)
        answer.append(je.commit(state, je.execute(MODEL, state, plan))[0])


@pytest.mark.parametrize("way", ["run", "stream", "its stream", "apply"])
def test_B7_every_way_to_take_an_event_from_an_engine_changes_the_queue_alone(way):
    with je.Engine(MODEL, SMALL) as engine:
        requests = [engine.create_request() for _ in range(3)]
        for request in requests:
            request.begin_turn([request.id, 5], je.TurnOptions(4))
        engine.run(1)
        before = without_queue(engine.state)
        (event,) = {
            "run": lambda: engine.run(1),
            "stream": lambda: [next(iter(engine.stream()))],
            "its stream": lambda: [next(iter(requests[1].stream()))],
            "apply": lambda: engine.apply(je.drain, 1),
        }[way]()
        assert_same(before, without_queue(engine.state))
        assert len(engine.state.control.events) == 1
        number = event.request_id if way == "apply" else event.request.id
        assert number == requests[1].id
