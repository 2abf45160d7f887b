"""The shell around the core: handles, closing, and interrupts, as an unkind user would try them (A1, A9 to A12, B1,
E2)."""

import copy
import dataclasses
import gc
import os
import signal
import weakref

import numpy as np
import pytest

import jaxengine as je
from jaxengine import engine as engine_module
from jaxengine.interrupts import interrupts_deferred
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

MODEL = toy_model()
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A process that was started in the background ignores SIGINT from birth."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def engine():
    with je.Engine(MODEL, SMALL) as engine:
        yield engine


def begun(engine, prompt=PROMPT, limit=4, options=None):
    request = engine.create_request(options)
    request.begin_turn(prompt, je.TurnOptions(limit))
    return request


def run_out(engine):
    events = []
    while engine.has_pending_requests():
        events += engine.run()
        je.check_invariants(engine.state)
    return events


def answered(request, prompt=PROMPT, limit=4):
    return request.tokens.tolist() == prompt + continuation(prompt, limit)


# Handles


def test_A1_what_a_handle_tells(engine):
    request = begun(engine, limit=2)
    assert (request.id, request.turn_id, request.status) == (1, 1, je.RequestStatus.QUEUED)
    assert (request.length, request.processed_length, request.max_session_tokens) == (5, 0, 64)
    assert repr(request) == "Request(id=1, status=QUEUED)"
    engine.run()
    assert (request.length, request.processed_length) == (6, 5)
    run_out(engine)
    assert answered(request, limit=2)
    request.close()
    assert (request.length, request.processed_length, request.turn_id, request.max_session_tokens) == (
        0,
        0,
        0,
        0,
    )
    assert request.tokens.tolist() == []
    assert repr(request) == "Request(id=1, status=CLOSED)"


def test_A1_options_shared_between_requests_tie_nothing_together(engine):
    options = je.RequestOptions(max_session_tokens=20, sampling=je.SamplingParams(temperature=0.0))
    turn = je.TurnOptions(3)
    requests = [engine.create_request(options) for _ in range(3)]
    for number, request in enumerate(requests):
        request.begin_turn([number], turn)
    requests[1].close()
    run_out(engine)
    assert answered(requests[0], [0], 3)
    assert answered(requests[2], [2], 3)


def test_A3_the_callers_array_and_the_handed_out_tokens_are_not_the_engines(engine):
    tokens = np.array(PROMPT)
    request = begun(engine, tokens)
    tokens[:] = 0
    engine.run()
    request.tokens[:] = 0
    run_out(engine)
    assert answered(request)


def test_A10_closing_with_events_retained_drops_them_and_keeps_those_handed_out(engine):
    first, second = begun(engine), begun(engine, [7])
    (event,) = engine.run(1)
    second.close()
    assert event.request is first
    assert [event.request for event in run_out(engine)] == [first] * 3
    first.close()
    assert event.request.status == je.RequestStatus.CLOSED
    assert event.token == continuation(PROMPT, 1)[0]
    first.close()
    assert engine.metrics.free_blocks == SMALL.num_blocks


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_A11_dropping_the_last_handle_is_closing_at_the_next_call(engine, steps):
    other = begun(engine, [7], limit=15)
    request = begun(engine, [2] * 20, limit=2)
    for _ in range(steps):
        engine.run()
    del request
    assert engine.has_pending_requests()
    assert engine.state.control.requests.id.tolist() == [other.id]
    assert all(event.request is other for event in run_out(engine))
    assert answered(other, [7], 15)


def test_A11_an_event_in_the_users_hands_keeps_the_request(engine):
    request = begun(engine)
    events = engine.run()
    del request
    assert engine.has_pending_requests()
    run_out(engine)
    assert answered(events[0].request)
    del events
    assert not engine.has_pending_requests()
    assert engine.metrics.residents == 0


def test_A11_retained_events_are_no_handles(engine):
    other = begun(engine, [7])
    request = begun(engine)
    engine.run(1)
    assert len(engine.state.control.events) == 1
    del request
    assert not any(event.request is not other for event in run_out(engine))


def test_A11_a_handle_that_is_collected_during_the_step_takes_its_events_along(engine, monkeypatch):
    """The last reference sits in a cycle, which the collector finds whenever it likes."""
    other = begun(engine, [7])
    cycle = {"request": begun(engine)}
    cycle["self"] = cycle
    del cycle
    commit = engine_module.commit

    def commit_and_collect(*arguments):
        gc.collect()
        return commit(*arguments)

    gc.disable()
    try:
        monkeypatch.setattr(engine_module, "commit", commit_and_collect)
        (event,) = engine.run()
    finally:
        gc.enable()
    assert event.request is other
    run_out(engine)
    assert answered(other, [7])
    assert engine.state.control.requests.id.tolist() == [other.id]


def test_A11_a_failure_that_ends_the_engine_keeps_no_callers_handle(engine):
    def serve():
        request = begun(engine)
        with je.inject_fault(je.Stage.PACK, RuntimeError("broken")):
            assert engine.run()[0].request is request

    serve()
    assert not engine.has_pending_requests()
    assert engine.metrics.residents == len(engine.state.control.requests) == 0
    with pytest.raises(je.EngineError, match="broken") as caught:
        engine.run()
    assert "in reach" in "".join(caught.value.__cause__.__notes__)


def test_A11_a_closed_and_dropped_request_is_nothing_to_reclaim_twice(engine):
    request = begun(engine)
    engine.run()
    request.close()
    del request
    later = begun(engine, [9])
    run_out(engine)
    assert answered(later, [9])


def test_A11_copies_of_a_handle_and_of_an_event_are_the_handle(engine):
    request = begun(engine)
    (event,) = engine.run()
    assert copy.copy(request) is copy.deepcopy(request) is request
    assert dataclasses.asdict(event)["request"] is copy.deepcopy(event).request is request


# Closing the engine


def test_A12_handles_of_a_closed_engine_are_tombstones(engine):
    request, idle = begun(engine), engine.create_request()
    (event,) = engine.run()
    engine.close()
    engine.close()
    for handle in (request, idle, event.request):
        assert handle.status == je.RequestStatus.CLOSED
        assert handle.length == handle.processed_length == handle.turn_id == 0
        assert handle.tokens.tolist() == []
        assert "CLOSED" in repr(handle)
        handle.close()
        with pytest.raises(je.RequestStateError, match="CLOSED with its engine"):
            handle.begin_turn([1])
        with pytest.raises(je.RequestStateError, match="CLOSED with its engine"):
            handle.cancel_turn(1)
    for call in (
        engine.run,
        engine.create_request,
        engine.has_pending_requests,
        lambda: engine.metrics,
        lambda: engine.state,
    ):
        with pytest.raises(je.EngineError, match="the engine is closed; make a new one"):
            call()


def test_A12_leaving_a_with_block_by_an_error_closes_and_passes_it_on():
    handles = []

    def serve():
        with je.Engine(MODEL, SMALL) as engine:
            handles.append(begun(engine))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    assert handles[0].status == je.RequestStatus.CLOSED


def test_A12_a_dropped_engine_frees_its_pages_and_leaves_tombstones():
    engine = je.Engine(MODEL, SMALL)
    request = begun(engine)
    engine.run()
    pages = weakref.ref(engine.state.store.pages[0])
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    assert pages() is None
    assert (request.status, request.length, request.tokens.size) == (je.RequestStatus.CLOSED, 0, 0)
    request.close()
    with pytest.raises(je.RequestStateError, match="CLOSED with its engine; make a new engine"):
        request.begin_turn([1])


def test_two_engines_over_one_model_do_not_touch():
    with je.Engine(MODEL, SMALL) as first, je.Engine(MODEL, SMALL) as second:
        one, other = begun(first), begun(second, [8, 8])
        while first.has_pending_requests() or second.has_pending_requests():
            first.run(1)
            second.run(1)
        assert answered(one)
        assert answered(other, [8, 8])
        first.close()
        assert answered(other, [8, 8])


# Errors and interrupts in the middle


@pytest.mark.parametrize("stage", ["plan_step", "execute"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_E2_F3_an_error_before_the_commit_leaves_the_engine_as_it_was(engine, monkeypatch, stage, error):
    request = begun(engine)
    for _ in range(3):
        before = leaves(engine.state)
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, stage, failing_after(getattr(engine_module, stage), error))
            with pytest.raises(error):
                engine.run()
        assert_same(before, leaves(engine.state))
        engine.run()
    run_out(engine)
    assert answered(request)


def failing_after(function, error):
    def fails(*arguments):
        function(*arguments)
        raise error

    return fails


def interrupting(function):
    """`function` with a real Ctrl-C in the middle: the program has run, its result is not yet anybody's."""

    def interrupted(*arguments):
        result = function(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    return interrupted


@pytest.mark.parametrize("name", ["commit", "execute"])
def test_E2_ctrl_c_in_a_step_loses_no_token_and_repeats_none(engine, monkeypatch, name):
    requests = [begun(engine), begun(engine, [7, 7])]
    seen = {request: [] for request in requests}
    interrupts = 0
    for turn in range(12):
        with monkeypatch.context() as patch:
            if turn % 2 == 0:
                patch.setattr(engine_module, name, interrupting(getattr(engine_module, name)))
            try:
                for event in engine.run():
                    seen[event.request].append(event.token)
            except KeyboardInterrupt:
                interrupts += 1
        je.check_invariants(engine.state)
    assert interrupts >= 3
    assert [seen[request] for request in requests] == [continuation(PROMPT, 4), continuation([7, 7], 4)]
    assert not engine.has_pending_requests()


def test_ctrl_c_while_a_request_is_made_leaves_none_without_a_handle(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            engine_module.requests, "create_request", interrupting(engine_module.requests.create_request)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.create_request()
    gc.collect()
    assert not engine.has_pending_requests()
    assert len(engine.state.control.requests) == 0
    assert engine.create_request().id == 2


def test_ctrl_c_while_abandoned_requests_are_reclaimed_forgets_none(engine, monkeypatch):
    handles = [begun(engine), begun(engine)]
    engine.run()
    handles.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            engine_module.requests, "close_request", interrupting(engine_module.requests.close_request)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    assert not engine.has_pending_requests()
    assert engine.metrics.free_blocks == SMALL.num_blocks


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler, "own"])
def test_interrupts_are_deferred_to_the_end_of_the_block_under_any_handler(handler):
    calls, inside = [], []
    handler = (lambda number, frame: calls.append(number)) if handler == "own" else handler

    def block():
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            inside.append(not calls)

    before = signal.signal(signal.SIGINT, handler)
    try:
        if handler is signal.default_int_handler:
            with pytest.raises(KeyboardInterrupt):
                block()
        else:
            block()
        assert inside == [True]
        assert signal.getsignal(signal.SIGINT) is handler
        assert len(calls) == (handler not in (signal.SIG_IGN, signal.default_int_handler))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_users_loop_over_events_loses_only_what_was_handed_out(engine):
    requests = [begun(engine), begun(engine, [7, 7])]
    seen = []

    def take_one():
        for event in engine.run(1):
            seen.append(event.token)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        take_one()
    seen += [event.token for event in run_out(engine)]
    expected = [
        token for pair in zip(continuation(PROMPT, 4), continuation([7, 7], 4), strict=True) for token in pair
    ]
    assert seen == expected
    assert answered(requests[0])


# Misuse of the state


def test_a_state_taken_from_the_engine_is_spent_by_its_next_commit(engine):
    request = begun(engine)
    state = engine.state
    engine.run()
    for call in (
        je.plan_step,
        je.create_request,
        lambda state: je.drain(state, 1),
        lambda state: je.close_request(state, 1),
    ):
        with pytest.raises(je.SpentStateError, match="use the state that commit returned"):
            call(state)
    run_out(engine)
    assert answered(request)


def test_working_on_a_copy_of_the_engines_state_does_not_change_the_engine(engine):
    request = begun(engine)
    state = engine.state
    for _ in range(4):
        transaction = je.execute(MODEL, state, je.plan_step(state))
        state, _ = je.commit(state, transaction, donate=False)
    assert request.length == 5
    run_out(engine)
    assert answered(request)


def test_metrics_add_up(engine):
    metrics = engine.metrics
    assert (metrics.steps, metrics.residents, metrics.rolled_back_steps, metrics.deferred_rows) == (
        0,
        0,
        0,
        0,
    )
    assert metrics.pool_tokens == SMALL.num_blocks * SMALL.block_size == 64
    (spec,) = MODEL.decoder.layers
    assert metrics.pool_bytes == 64 * 2 * spec.head_dim * 4
    requests = [begun(engine, [1] * 40, 1), begun(engine, [2] * 40, 1)]
    engine.run()
    metrics = engine.metrics
    assert (metrics.steps, metrics.residents, metrics.deferred_rows) == (1, 1, 1)
    assert metrics.free_blocks == metrics.num_blocks - 10
    assert requests[1].status == je.RequestStatus.QUEUED
