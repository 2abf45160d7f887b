"""Detaching a state from one engine and attaching it to another: handed over whole, served as if nothing had happened,
and refused where it can't be (A1, A10, A11, A12)."""

import dataclasses
import gc

import pytest

import jaxengine as je
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, leaves

MODEL = toy_model()
PROMPTS = ([3, 1], [2] * 20, [9], [7, 7])
LIMIT = 6


def engine_with(*prompts):
    engine = je.Engine(MODEL, SMALL)
    handles = {}
    for prompt in prompts:
        request = engine.create_request()
        request.begin_turn(prompt, je.TurnOptions(LIMIT))
        handles[request.id] = request
    return engine, handles


def tokens_to_the_end(engine, handles):
    while engine.has_pending_requests():
        engine.run()
        je.check_invariants(engine.state)
    return {number: request.tokens.tolist() for number, request in handles.items()}


EXPECTED = {
    number: prompt + continuation(prompt, LIMIT) for number, prompt in enumerate(map(list, PROMPTS), start=1)
}


@pytest.mark.parametrize("runs", range(7))
@pytest.mark.parametrize("same_engine", [False, True])
def test_a_state_goes_on_in_another_engine_with_the_same_tokens_and_events(runs, same_engine):
    """At any point: queued, in a prefill, decoding, with events retained."""
    engine, handles = engine_with(*PROMPTS)
    twin, twins_handles = engine_with(*PROMPTS)
    for _ in range(runs):
        engine.run(1)
        twin.run(1)
    before = leaves(engine.state)
    state = engine.detach()
    assert not engine.has_state
    assert_same(before, leaves(state))
    del handles
    gc.collect()
    other = engine if same_engine else je.Engine(MODEL, SMALL)
    if not same_engine:
        other.detach()
    rebuilt = other.attach(state)
    assert sorted(rebuilt) == [1, 2, 3, 4]
    assert all(request.id == number for number, request in rebuilt.items())
    assert_same(before, leaves(other.state))
    while other.has_pending_requests():
        assert twin.has_pending_requests()
        events, expected = other.run(3), twin.run(3)
        assert [(e.request.id, e.token, e.flags, e.usage) for e in events] == [
            (e.request.id, e.token, e.flags, e.usage) for e in expected
        ]
    assert tokens_to_the_end(other, rebuilt) == EXPECTED == tokens_to_the_end(twin, twins_handles)


def test_A12_handles_of_a_detached_state_are_tombstones_even_if_it_comes_back():
    """The old and the new handle have one id; only the new one is the request's."""
    engine, handles = engine_with(*PROMPTS)
    (event,) = engine.run(1)
    old, streams = handles[1], [iter(request.stream()) for request in handles.values()]
    state = engine.detach()
    for attached in (False, True):
        if attached:
            rebuilt = engine.attach(state)
            assert rebuilt[1] is not old
        assert event.request is old
        assert (old.status, old.length, old.turn_id) == (je.RequestStatus.CLOSED, 0, 0)
        assert old.tokens.tolist() == []
        old.close()
        for call, argument in ((old.begin_turn, [1]), (old.cancel_turn, 1)):
            with pytest.raises(je.RequestStateError, match="use the handle that attach returned"):
                call(argument)
        assert [list(stream) for stream in streams] == [[], [], [], []]
    del old, call, event, handles, streams
    gc.collect()
    assert tokens_to_the_end(engine, rebuilt) == EXPECTED


def test_A1_A11_ids_go_on_and_dropped_handles_close_their_requests():
    engine, _handles = engine_with(*PROMPTS)
    engine.run()
    state = engine.detach()
    with je.Engine(MODEL, SMALL) as other:
        other.detach()
        rebuilt = other.attach(state)
        assert other.create_request().id == 5
        del rebuilt[2]
        other.has_pending_requests()
        assert other.state.control.requests.id.tolist() == [1, 3, 4]
        assert tokens_to_the_end(other, rebuilt) == {n: EXPECTED[n] for n in (1, 3, 4)}


def test_A11_requests_that_are_abandoned_before_the_handover_do_not_come_along():
    engine, handles = engine_with(*PROMPTS)
    engine.run()
    del handles[3]
    state = engine.detach()
    assert state.control.requests.id.tolist() == [1, 2, 4]
    handles.clear()
    assert sorted(engine.attach(state)) == [1, 2, 4]


def test_a_state_made_by_the_core_can_be_served_and_handed_back():
    state = begun(MODEL, *PROMPTS, limit=LIMIT)
    state, _ = je.step(MODEL, state)
    engine = je.Engine(MODEL, SMALL)
    engine.detach()
    handles = engine.attach(state)
    events = engine.run(64)
    assert [event.token for event in events if event.request is handles[1]] == continuation(PROMPTS[0], 1)
    state = engine.detach()
    state, _ = je.step(MODEL, state)
    je.check_invariants(state)
    assert tokens_to_the_end(engine, engine.attach(state)) == EXPECTED


def test_a_detached_engine_says_what_to_do():
    engine, handles = engine_with([1])
    engine.detach()
    for call in (engine.run, engine.create_request, engine.has_pending_requests, engine.detach):
        with pytest.raises(je.EngineError, match="the engine is detached; attach a state"):
            call()
    for question in (lambda: engine.state, lambda: engine.metrics, lambda: engine.run(0)):
        with pytest.raises(je.EngineError, match="detached"):
            question()
    assert list(engine.stream()) == list(handles[1].stream()) == []
    engine.close()
    with pytest.raises(je.EngineError, match="the engine is closed; make a new one"):
        engine.run()


def another_model(model=MODEL):
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, identity="another"))


def spent():
    state = begun(MODEL, [1])
    je.step(MODEL, state)
    return state


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (spent, je.SpentStateError, "this state was spent by a commit"),
        (lambda: begun(another_model(), [1]), ValueError, "the state was made for another model"),
        (lambda: None, TypeError, "the state is a NoneType; give an EngineState"),
        (lambda: SMALL, TypeError, "give an EngineState"),
        (
            lambda: je.create_request(begun(MODEL)),
            TypeError,
            "the state is a tuple; .* in front of their result",
        ),
    ],
)
def test_what_attach_refuses_leaves_the_engine_without_a_state(make, error, words):
    engine, _ = engine_with()
    state = engine.detach()
    with pytest.raises(error, match=words):
        engine.attach(make())
    assert not engine.has_state
    assert engine.attach(state) == {}


def test_attach_refuses_an_engine_that_has_a_state_or_is_closed():
    engine, handles = engine_with(*PROMPTS)
    with pytest.raises(je.EngineError, match="the engine has a state; detach it first"):
        engine.attach(begun(MODEL))
    assert tokens_to_the_end(engine, handles) == EXPECTED
    state = engine.detach()
    engine.close()
    with pytest.raises(je.EngineError, match="the engine is closed; make a new one"):
        engine.attach(state)


def test_A4_a_failure_stays_with_its_state():
    """Whoever attaches it may drain what it has to say, and closes it; the engine that let it go is healthy again."""
    engine, _handles = engine_with(*PROMPTS)
    with je.inject_fault(je.Stage.EXECUTE, RuntimeError("the device is gone")):
        engine.run(1)
    failed = engine.detach()
    good = begun(MODEL, *PROMPTS, limit=LIMIT)
    assert tokens_to_the_end(engine, engine.attach(good)) == EXPECTED

    other = je.Engine(MODEL, SMALL)
    other.detach()
    rebuilt = other.attach(failed)
    assert {request.status for request in rebuilt.values()} == {je.RequestStatus.TURN_COMPLETE}
    with pytest.raises(je.EngineError, match="the device is gone"):
        other.run(0)
    assert [event.request.id for event in other.run()] == [2, 3, 4]
    for call in (other.run, other.create_request, lambda: rebuilt[1].begin_turn([1])):
        with pytest.raises(
            je.EngineError, match=r"the engine has stopped: .*the device is gone; make a new one"
        ):
            call()
    rebuilt[1].close()
    assert not other.has_pending_requests()
    je.check_invariants(other.state)


def test_of_two_engines_over_one_state_the_first_commit_keeps_it():
    engine, _handles = engine_with([1])
    other = je.Engine(MODEL, SMALL)
    other.detach()
    rebuilt = other.attach(engine.state)
    other.run()
    with pytest.raises(je.SpentStateError, match="spent by a commit"):
        engine.run()
    engine.close()
    assert tokens_to_the_end(other, rebuilt) == {1: [1, *continuation([1], LIMIT)]}
