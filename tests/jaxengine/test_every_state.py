"""Each call on a request in each state that it can be in: allowed, refused with nothing changed, or nothing at all
(A2, A4, A8, A10, B1)."""

import dataclasses

import pytest

import jaxengine as je
from jaxengine.toy import CONTEXT, NAN, continuation, next_token, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

LONG = [2] * 20
"""Its prefill takes two steps."""
MODEL = toy_model()
ENDING = toy_model(eos=[next_token(LONG)])
CREATED, QUEUED, ACTIVE, COMPLETE, CLOSED = je.RequestStatus


def another(engine, prompt, limit):
    """A request beside the one that is looked at; its handle is kept."""
    engine.others.append(engine.create_request())
    engine.others[-1].begin_turn(prompt, je.TurnOptions(limit))
    return engine.others[-1]


def created(engine):
    return engine.create_request()


def queued(engine):
    request = created(engine)
    request.begin_turn(LONG, je.TurnOptions(2))
    return request


def in_prefill(engine):
    request = queued(engine)
    engine.run()
    return request


def decoding(engine):
    request = in_prefill(engine)
    assert [event.request for event in engine.run()] == [request]
    return request


def decoding_undrained(engine):
    """Another request's event comes first."""
    first = another(engine, [1], 1)
    request = engine.create_request()
    request.begin_turn([5], je.TurnOptions(3))
    assert [event.request for event in engine.run(1)] == [first]
    return request


def preempted(engine):
    """Its blocks went to an older request; it has tokens of its own and holds nothing."""
    another(engine, [1] * 40, 20)
    request = engine.create_request()
    request.begin_turn([3] * 14, je.TurnOptions(20))
    while request.status != QUEUED or not request.length > 14:
        engine.run()
    assert request.processed_length == 0
    return request


def ended_undrained(engine):
    first = another(engine, [1], 20)
    request = queued(engine)
    while request.status != COMPLETE:
        (event,) = engine.run(1)
    assert event.request is first
    return request


def ended(engine):
    request = decoding(engine)
    engine.run()
    return request


def continued(engine):
    request = ended(engine)
    request.begin_turn([1, 1], je.TurnOptions(2))
    return request


def ended_by_eos(engine):
    request = in_prefill(engine)
    (event,) = engine.run()
    assert event.finish_reason == je.FinishReason.EOS
    return request


def cancelled_before_admission(engine):
    request = queued(engine)
    request.cancel_turn(1)
    engine.run()
    return request


def failed(engine):
    request = engine.create_request()
    request.begin_turn([NAN])
    while request.status != COMPLETE or engine.has_pending_requests():
        engine.run()
    return request


def closed(engine):
    request = decoding(engine)
    request.close()
    return request


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a state allows; `begin` and `cancel` are the words of a refusal, or what they return."""

    status: je.RequestStatus
    begin: str | int
    cancel: str | bool
    turn: int = 1


STATES = {
    created: Expected(CREATED, 1, "has had no turn yet", 0),
    queued: Expected(QUEUED, "is QUEUED", True),
    in_prefill: Expected(ACTIVE, "is ACTIVE", True),
    decoding: Expected(ACTIVE, "is ACTIVE", True),
    decoding_undrained: Expected(ACTIVE, "is ACTIVE", True),
    preempted: Expected(QUEUED, "is QUEUED", True),
    ended_undrained: Expected(COMPLETE, "has events that were not drained", False),
    ended: Expected(COMPLETE, 2, False),
    continued: Expected(QUEUED, "is QUEUED", True, 2),
    ended_by_eos: Expected(COMPLETE, 2, False),
    cancelled_before_admission: Expected(COMPLETE, 2, False),
    failed: Expected(COMPLETE, 2, False),
    closed: Expected(CLOSED, "is CLOSED", "is CLOSED", 0),
}


@pytest.fixture(params=STATES, ids=lambda state: state.__name__)
def case(request):
    with je.Engine(ENDING if request.param is ended_by_eos else MODEL, SMALL) as engine:
        engine.others = []
        handle = request.param(engine)
        expected = STATES[request.param]
        assert (handle.status, handle.turn_id) == (expected.status, expected.turn)
        yield engine, handle, expected


def refused(engine, words, call, *arguments):
    before, metrics = leaves(engine.state), engine.metrics
    with pytest.raises(je.RequestStateError, match=words):
        call(*arguments)
    assert_same(before, leaves(engine.state))
    assert engine.metrics == metrics


def test_A2_A4_a_turn_begins_only_in_a_request_that_is_new_or_complete_and_drained(case):
    engine, request, expected = case
    if isinstance(expected.begin, str):
        refused(engine, expected.begin, request.begin_turn, [4, 4])
        return
    before = request.tokens.tolist()
    assert request.begin_turn([4, 4], je.TurnOptions(2)) == expected.begin
    assert (request.status, request.turn_id) == (QUEUED, expected.begin)
    assert request.tokens.tolist() == [*before, 4, 4]
    while engine.has_pending_requests():
        engine.run()
    whole = [*before, 4, 4]
    assert request.tokens.tolist() == whole + continuation(whole, 2)


def test_A8_cancelling_ends_a_live_turn_once_and_keeps_what_is_there(case):
    engine, request, expected = case
    if isinstance(expected.cancel, str):
        for turn in (0, 1, 2):
            refused(engine, expected.cancel, request.cancel_turn, turn)
        return
    before = leaves(engine.state)
    for turn in {0, 1, 2, 3, 2**64 - 1} - {request.turn_id}:
        assert not request.cancel_turn(turn)
    assert_same(before, leaves(engine.state))
    held = (request.tokens.tolist(), request.length, request.processed_length, engine.metrics)
    published = len(engine.state.control.events)
    assert request.cancel_turn(request.turn_id) is expected.cancel
    if not expected.cancel:
        assert_same(before, leaves(engine.state))
        return
    assert (request.tokens.tolist(), request.length, request.processed_length, engine.metrics) == held
    assert request.status == COMPLETE
    (event,) = engine.state.control.events[published:]
    assert (event.request_id, event.turn_id) == (request.id, request.turn_id)
    assert event.flags == je.EngineEventFlags.TURN_FINISHED
    assert event.finish_reason == je.FinishReason.CANCELLED
    assert not request.cancel_turn(request.turn_id)
    refused(engine, "not drained", request.begin_turn, [4])
    while engine.has_pending_requests():
        engine.run()
        je.check_invariants(engine.state)
    assert request.tokens.tolist() == held[0]
    for other in engine.others:
        other.close()
    assert request.begin_turn([4], je.TurnOptions(1)) == expected.turn + 1
    while engine.has_pending_requests():
        engine.run()
    whole = [*held[0], 4]
    assert request.tokens.tolist() == whole + continuation(whole, 1)


def test_A10_closing_takes_nothing_but_the_request_and_its_events(case):
    engine, request, _ = case
    others = [event for event in engine.state.control.events if event.request_id != request.id]
    ids = [number for number in engine.state.control.requests.id.tolist() if number != request.id]
    request.close()
    assert (request.status, request.length, request.turn_id) == (CLOSED, 0, 0)
    assert list(engine.state.control.events) == others
    assert engine.state.control.requests.id.tolist() == ids
    je.check_invariants(engine.state)
    state = engine.state
    request.close()
    assert_same(leaves(state), leaves(engine.state))
    refused(engine, "is CLOSED", request.begin_turn, [4])
    refused(engine, "is CLOSED", request.cancel_turn, 1)


def test_A4_no_turn_begins_beyond_the_session_limit_in_any_state_that_could_begin_one(case):
    engine, request, expected = case
    if isinstance(expected.begin, str):
        return
    most = CONTEXT - request.length
    for count in (most, most + 1, 10 * CONTEXT):
        before = leaves(engine.state)
        words = f"request {request.id} would hold {request.length + count} tokens of at most {CONTEXT}; leave room"
        with pytest.raises(ValueError, match=words):
            request.begin_turn([1] * count)
        assert_same(before, leaves(engine.state))
    assert request.begin_turn([1] * (most - 1)) == expected.begin


def test_A4_B1_an_engine_that_has_stopped_begins_nothing_and_says_why(case):
    """It raises at once for no events; for some it first gives those that are retained."""
    engine, request, expected = case
    live = request.status in (QUEUED, ACTIVE)
    mine = sum(event.request_id == request.id for event in engine.state.control.events)
    with je.inject_fault(je.Stage.PLAN, je.ContractError("the plan contradicts itself")):
        engine._step()
    before = leaves(engine.state)
    stopped = "the engine has stopped: the plan contradicts itself; make a new one"
    for call in (
        lambda: engine.run(0),
        engine.create_request,
        lambda: request.begin_turn([4]),
    ):
        with pytest.raises(je.EngineError, match=stopped):
            call()
        assert_same(before, leaves(engine.state))
    events = engine.run(99)
    assert engine.state.control.events == ()
    assert sum(event.request is request for event in events) == mine + live
    assert je.EngineEventFlags.FAILED in events[-1].flags
    assert request.status == (COMPLETE if live else expected.status)
    for _ in range(2):
        with pytest.raises(je.EngineError, match=stopped) as failure:
            engine.run()
        assert isinstance(failure.value.__cause__, je.ContractError)
    if expected.status not in (CREATED, CLOSED):
        assert not request.cancel_turn(request.turn_id)
    request.close()
    assert request.status == CLOSED


def test_B1_no_events_from_an_engine_that_has_stopped_reclaims_nothing():
    engine = je.Engine(MODEL, SMALL)
    request = queued(engine)
    with je.inject_fault(je.Stage.EXECUTE, RuntimeError("the device is gone")):
        engine.run(1)
    del request
    before = leaves(engine.state)
    with pytest.raises(je.EngineError, match="the device is gone"):
        engine.run(0)
    assert_same(before, leaves(engine.state))
    assert not engine.has_pending_requests()
    assert len(engine.state.control.requests) == 0
