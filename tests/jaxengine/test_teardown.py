"""However an engine ends, and whatever it was doing, it ends without an error, gives its memory back and leaves closed
tombstones (A10, A12)."""

import gc
import threading
import weakref

import jax
import pytest

import jaxengine as je
from jaxengine.events import EngineEventFlags
from jaxengine.toy import NAN, continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

MODEL = toy_model()


def fresh(engine):
    return [engine.create_request()], []


def at_work(engine):
    """One request decodes, one is in its prefill, one waits, one is new; an event is out and another retained."""
    requests = [engine.create_request() for _ in range(4)]
    for request, prompt in zip(requests, ([1], [3, 3], [2] * 20), strict=False):
        request.begin_turn(prompt, je.TurnOptions(3))
    return requests, engine.run(1)


def with_abandoned_requests(engine):
    requests, events = at_work(engine)
    del requests[1]
    return requests, events


def failing(engine):
    requests, events = at_work(engine)
    requests[3].begin_turn([NAN])
    while EngineEventFlags.RETRYABLE not in events[-1].flags:
        events += engine.run(1)
    return requests, events


def failed_at(stage):
    def stopped(engine):
        requests, events = at_work(engine)
        with je.inject_fault(stage, RuntimeError("the device is gone")) as fault:
            while not fault.fired:
                events += engine.run(1)
        return requests, events

    return stopped


def with_its_state_spent_by_someone_else(engine):
    requests, events = at_work(engine)
    je.step(MODEL, engine.state)
    return requests, events


def detached(engine):
    requests, events = at_work(engine)
    engine.detach()
    return requests, events


def closed(engine):
    requests, events = at_work(engine)
    engine.close()
    return requests, events


CONDITIONS = [
    fresh,
    at_work,
    with_abandoned_requests,
    failing,
    failed_at(je.Stage.EXECUTE),
    failed_at(je.Stage.PUBLISH),
    with_its_state_spent_by_someone_else,
    detached,
    closed,
]


def close(holder):
    holder[0].close()


def leave(holder):
    with holder[0]:
        pass


def leave_by_an_error(holder):
    with pytest.raises(ZeroDivisionError), holder[0]:
        raise ZeroDivisionError


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


ENDS = [close, leave, leave_by_an_error, drop, drop_in_a_cycle, drop_elsewhere]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_A10_A12_every_end_is_the_same_teardown(condition, end):
    """pytest makes an error of whatever a finaliser may raise."""
    engine = je.Engine(MODEL, SMALL)
    requests, events = condition(engine)
    arrays = [*engine.state.store.pages, engine.state.store.block_table] if engine.has_state else []
    memory = [weakref.ref(array) for array in arrays]
    del arrays
    streams = [iter(request.stream()) for request in requests]
    holder = [engine]
    del engine
    end(holder)
    gc.collect()
    assert [array() for array in memory] == [None] * len(memory)
    for request in [*requests, *[event.request for event in events if event.request]]:
        assert request.status == je.RequestStatus.CLOSED
        assert request.length == request.processed_length == request.turn_id == 0
        assert request.max_session_tokens == 0
        assert request.tokens.tolist() == []
        assert repr(request) == f"Request(id={request.id}, status=CLOSED)"
        request.close()
        for call, argument in ((request.begin_turn, [1]), (request.cancel_turn, 1)):
            with pytest.raises(je.RequestStateError, match="is CLOSED with its engine; make a new engine"):
                call(argument)
        assert list(request.stream()) == []
    assert [list(stream) for stream in streams] == [[] for _ in requests]
    assert [event.token for event in events[:1]] == continuation([1], 1)[: len(events)]


def test_A12_closing_again_and_leaving_again_are_nothing():
    with je.Engine(MODEL, SMALL) as engine, engine:
        requests, _events = at_work(engine)
        engine.close()
        engine.close()
    assert not engine.has_state
    assert requests[0].status == je.RequestStatus.CLOSED
    with pytest.raises(je.EngineError, match="the engine is closed; make a new one"):
        engine.run(0)


def test_A12_entering_a_closed_engine_does_not_revive_it():
    engine = je.Engine(MODEL, SMALL)
    engine.close()
    with engine as same, pytest.raises(je.EngineError, match="closed"):
        same.create_request()


def test_A12_the_end_of_one_engine_is_nothing_to_another():
    """Over one model, and with requests of the same ids."""
    first, second = je.Engine(MODEL, SMALL), je.Engine(MODEL, SMALL)
    requests, (others, _events) = at_work(first), at_work(second)
    before = leaves(second.state)
    first.close()
    del first, requests
    gc.collect()
    second.run(0)
    assert_same(before, leaves(second.state))
    while second.has_pending_requests():
        second.run()
    assert others[2].tokens.tolist() == [2] * 20 + continuation([2] * 20, 3)


def test_A12_a_handle_outlives_its_engine_and_goes_in_peace():
    requests, events = at_work(je.Engine(MODEL, SMALL))
    events.clear()
    gc.collect()
    assert {request.status for request in requests} == {je.RequestStatus.CLOSED}
    thread = threading.Thread(target=requests.clear)
    thread.start()
    thread.join()


def test_F1_a_failed_step_keeps_nothing_on_the_device():
    """The error that tells of it has a traceback, whose frames hold the step's arrays."""
    engine = je.Engine(MODEL, SMALL)
    request = engine.create_request()
    request.begin_turn([NAN], je.TurnOptions(1))

    def arrays():
        gc.collect()
        return len(jax.live_arrays())

    before = arrays()
    (event,) = engine.run(1)
    assert event.flags == EngineEventFlags.RETRYABLE
    assert arrays() == before
