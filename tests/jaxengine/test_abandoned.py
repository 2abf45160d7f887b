"""A request whose last handle is dropped, however and whenever, ends exactly as if it had been closed (A11)."""

import gc
import threading
import tracemalloc

import pytest

import jaxengine as je
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

MODEL = toy_model()
LONG = [2] * 20
"""Its prefill takes two steps."""


def created(engine):
    return engine.create_request()


def queued(engine):
    request = engine.create_request()
    request.begin_turn(LONG, je.TurnOptions(2))
    return request


def in_prefill(engine):
    request = queued(engine)
    engine.run()
    assert (request.status, request.processed_length) == (je.RequestStatus.ACTIVE, 14)
    return request


def decoding(engine):
    request = in_prefill(engine)
    engine.run()
    assert request.length == 21
    return request


def ended_with_its_events_retained(engine):
    request = decoding(engine)
    engine.run(1)
    assert [event.request_id for event in engine.state.control.events] == [request.id]
    return request


def complete(engine):
    request = decoding(engine)
    engine.run()
    assert request.status == je.RequestStatus.TURN_COMPLETE
    return request


def cancelled_before_admission(engine):
    request = queued(engine)
    request.cancel_turn(1)
    return request


def closed(engine):
    request = decoding(engine)
    request.close()
    return request


STATES = [
    created,
    queued,
    in_prefill,
    decoding,
    ended_with_its_events_retained,
    complete,
    cancelled_before_admission,
    closed,
]


def drop(holder):
    holder.clear()


def drop_in_a_cycle(holder):
    cycle = [holder.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def drop_elsewhere(holder):
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()


def drop_in_a_cycle_collected_elsewhere(holder):
    cycle = [holder.pop()]
    cycle.append(cycle)
    del cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def drop_with_a_suspended_iterator(holder):
    stream = iter(holder[0].stream())
    holder.clear()
    stream.close()


def drop_with_an_exception_that_held_it(holder):
    def fail(request):
        raise ZeroDivisionError

    try:
        fail(holder.pop())
    except ZeroDivisionError as error:
        kept = error
    del kept
    gc.collect()


DROPS = [
    drop,
    drop_in_a_cycle,
    drop_elsewhere,
    drop_in_a_cycle_collected_elsewhere,
    drop_with_a_suspended_iterator,
    drop_with_an_exception_that_held_it,
]


def engine_with_another():
    engine = je.Engine(MODEL, SMALL)
    other = engine.create_request()
    other.begin_turn([7, 7], je.TurnOptions(15))
    return engine, other


@pytest.mark.parametrize("way", DROPS)
@pytest.mark.parametrize("state", STATES)
def test_A11_dropping_is_closing_leaf_by_leaf(state, way):
    (engine, other), (twin, _twins_other) = engine_with_another(), engine_with_another()
    gc.disable()
    try:
        holder = [state(engine)]
        state(twin).close()
        way(holder)
        assert engine.has_pending_requests()
    finally:
        gc.enable()
    assert holder == []
    assert_same(leaves(twin.state), leaves(engine.state))
    je.check_invariants(engine.state)
    while engine.has_pending_requests():
        assert {event.request for event in engine.run()} <= {other}
    assert other.tokens.tolist() == [7, 7, *continuation([7, 7], 15)]


def refused(call, *arguments):
    with pytest.raises(je.RequestStateError):
        call(*arguments)


BOUNDARIES = {
    "run": lambda engine, other: engine.run(1),
    "has_pending_requests": lambda engine, other: engine.has_pending_requests(),
    "create_request": lambda engine, other: engine.create_request(),
    "apply": lambda engine, other: engine.apply(je.drain, 0),
    "detach": lambda engine, other: engine.detach(),
    "stream": lambda engine, other: next(iter(engine.stream())),
    "begin_turn": lambda engine, other: refused(other.begin_turn, [1]),
    "cancel_turn": lambda engine, other: other.cancel_turn(9),
    "close": lambda engine, other: other.close(),
    "its stream": lambda engine, other: next(iter(other.stream())),
}
NONE = {
    "run(0)": lambda engine, other: engine.run(0),
    "metrics": lambda engine, other: engine.metrics,
    "state": lambda engine, other: engine.state,
    "tokens": lambda engine, other: other.tokens,
    "streams not begun": lambda engine, other: (engine.stream(), other.stream()),
}


@pytest.mark.parametrize(
    ("call", "reclaims"),
    [(call, True) for call in BOUNDARIES.values()] + [(call, False) for call in NONE.values()],
    ids=[*BOUNDARIES, *NONE],
)
def test_A11_B1_every_call_that_works_reclaims_and_a_question_does_not(call, reclaims):
    engine, other = engine_with_another()
    request = queued(engine)
    engine.run()
    engine.run()
    control = engine.state.control
    del request
    assert engine.state.control is control
    result = call(engine, other)
    state = result if isinstance(result, je.EngineState) and reclaims else engine.state
    assert (2 in state.control.requests.id) == (not reclaims)


def test_A11_an_event_keeps_its_request_however_it_is_held():
    engine, _other = engine_with_another()
    request = decoding(engine)
    (event,) = [event for event in engine.run() if event.request is request]
    held = {event: [event]}
    del request, event
    gc.collect()
    assert engine.has_pending_requests()
    assert 2 in engine.state.control.requests.id
    (event,) = held
    assert event.request.tokens.tolist() == LONG + continuation(LONG, 2)
    assert event.request.begin_turn([1], je.TurnOptions(1)) == 2
    del event
    held.clear()
    engine.has_pending_requests()
    assert 2 not in engine.state.control.requests.id


def test_A11_the_engines_handles_by_id_keep_none_alive():
    engine, other = engine_with_another()
    for _ in range(50):
        engine.create_request()
    engine.has_pending_requests()
    assert engine.state.control.requests.id.tolist() == [other.id]
    assert len(engine._handles) == 1


def peak_of(call):
    """Most bytes that `call` held at once, its temporaries included."""
    call()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    call()
    return tracemalloc.get_traced_memory()[1] - before


def test_A11_with_nothing_abandoned_the_check_allocates_nothing():
    engine, _other = engine_with_another()
    held = [decoding(engine), queued(engine)]

    def reclaim():
        engine._reclaim()

    def nothing():
        held.index(held[0])

    tracemalloc.start()
    try:
        empty = peak_of(nothing)
        state = engine.state
        assert peak_of(reclaim) == empty
        assert engine.state is state
        held.pop()
        assert peak_of(lambda: held.append(queued(engine))) > empty
    finally:
        tracemalloc.stop()


def test_A11_nothing_is_left_of_requests_that_were_abandoned():
    """Finalisers, weak references and columns go; only the count of ids given out stays."""
    engine, other = engine_with_another()

    def objects():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(2):
        before = objects()
        for _ in range(30):
            queued(engine)
            engine.has_pending_requests()
    after = objects()
    assert after - before < 30
    assert len(engine.state.control.requests) == 1
    assert other.status == je.RequestStatus.QUEUED
