"""What `run` returns and what it keeps (B1 to B6, B9), and what an event carries (B3)."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import ALL_MASKED, LETTERS, NAN, continuation, next_token, toy_model, with_params
from tests.jaxengine.harness import SMALL, assert_same, leaves
from tests.jaxengine.naive import NaiveEngine

MODEL = toy_model()
PROMPTS = ([1, 2], [3, 4, 5], [6])
TOKENS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20)


def engine_with(*prompts, limit=2, model=MODEL, config=SMALL):
    engine = je.Engine(model, config)
    requests = [engine.create_request() for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    return engine, requests


def seen(events):
    return [(event.request.id, event.token, event.finish_reason.name) for event in events]


def as_record(event):
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    request = fields.pop("request")
    return je.EventRecord(request_id=request.id, **(fields | {"detail": ""}))


def expected(prompts, limit):
    """The events of prompts that all fit one step, step by step."""
    answers = [continuation(prompt, limit) for prompt in prompts]
    return [
        (request + 1, answer[nth], "MAX_GENERATED_TOKENS" if nth == limit - 1 else "NONE")
        for nth in range(limit)
        for request, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("retained", [False, True])
def test_B1_zero_events_does_nothing_at_all(retained):
    engine, requests = engine_with(*PROMPTS)
    if retained:
        engine.run(1)
    requests.pop()
    before = leaves(engine.state)
    assert engine.run(0) == []
    assert_same(before, leaves(engine.state))
    assert engine.metrics.steps == retained


def test_B1_zero_events_still_asks_whether_the_engine_is_alive():
    engine, _ = engine_with(*PROMPTS)
    engine.close()
    with pytest.raises(je.EngineError, match="closed"):
        engine.run(0)


def test_B1_B2_a_call_drains_or_steps_and_never_both():
    engine, _ = engine_with(*PROMPTS)
    collected = seen(engine.run(2))
    assert (engine.metrics.steps, len(collected)) == (1, 2)
    collected += seen(engine.run(64))
    assert (engine.metrics.steps, len(collected)) == (1, 3)
    collected += seen(engine.run(64))
    assert (engine.metrics.steps, len(collected)) == (2, 6)
    assert collected == expected(PROMPTS, 2)
    assert engine.run() == []


@given(
    prompts=st.lists(TOKENS, min_size=1, max_size=6),
    limits=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    size=st.integers(1, 9),
)
@settings(max_examples=30)
def test_B2_B4_the_stream_is_the_same_however_few_events_a_call_takes(prompts, limits, size):
    engine, twin = je.Engine(MODEL, SMALL), NaiveEngine(SMALL)
    requests = [engine.create_request() for _ in prompts]
    for request, prompt, limit in zip(requests, prompts, limits, strict=False):
        request.begin_turn(prompt, je.TurnOptions(limit))
        twin.begin(twin.create(), prompt, limit)
    while engine.has_pending_requests():
        steps, had = engine.metrics.steps, len(engine.state.control.events)
        events = engine.run(size)
        je.check_invariants(engine.state)
        stepped = engine.metrics.steps - steps
        assert stepped <= (not had)
        assert len(events) == min(size, had) or not had
        if events and events[0].request is None:
            assert not twin.plan().rows
            requests[0].close()
            twin.close(requests.pop(0).id)
            continue
        if stepped:
            twin.step()
        assert list(map(as_record, events)) == [dataclasses.replace(r, detail="") for r in twin.drain(size)]
    assert twin.candidates() == []


def test_B2_one_event_at_a_time_takes_no_extra_steps():
    engine, _ = engine_with(*PROMPTS)
    collected = []
    while engine.has_pending_requests():
        (event,) = engine.run(1)
        collected.append(event)
    assert seen(collected) == expected(PROMPTS, 2)
    assert engine.metrics.steps == 2


def test_B3_a_last_token_and_completion_share_one_event_and_eos_alone_has_no_token():
    engine, (request,) = engine_with([1, 2], limit=1)
    (event,) = engine.run()
    assert event.flags == je.EngineEventFlags.TOKEN | je.EngineEventFlags.TURN_FINISHED
    assert (event.request, event.turn_id, event.token) == (request, 1, next_token([1, 2]))
    assert event.usage == je.Usage(prompt_tokens=2, generated_tokens=1, cached_prompt_tokens=0)
    assert (event.error_code, event.detail) == (je.EngineErrorCode.NONE, "")

    engine, _ = engine_with([1, 2], model=toy_model(eos=[next_token([1, 2])]))
    (event,) = engine.run()
    assert event.flags == je.EngineEventFlags.TURN_FINISHED
    assert (event.token, event.finish_reason) == (-1, je.FinishReason.EOS)


def test_B3_flags_and_codes_are_pinned():
    assert {flag.name: flag.value for flag in je.EngineEventFlags} == {
        "TOKEN": 1,
        "TURN_FINISHED": 2,
        "FAILED": 4,
        "CAPACITY_BLOCKED": 8,
        "RETRYABLE": 16,
        "GRAMMAR_INCOMPLETE": 32,
    }
    assert je.EngineEventFlags.NONE == 0
    assert [reason.name for reason in je.FinishReason] == [
        "NONE",
        "EOS",
        "STOP_STRING",
        "MAX_GENERATED_TOKENS",
        "MAX_SESSION_TOKENS",
        "CANCELLED",
        "FAILED",
    ]
    assert [code.name for code in je.EngineErrorCode] == [
        "NONE",
        "CAPACITY_DEFERRED",
        "REQUEST_UNSERVICEABLE",
        "RETRYABLE_EXECUTION",
        "EXECUTION_CAPACITY_EXCEEDED",
        "ENGINE_CONTRACT_FAILURE",
        "ENGINE_EXECUTION_FAILURE",
        "GUIDANCE_FAILURE",
    ]


def test_B4_events_keep_the_order_of_the_plan():
    engine, requests = engine_with([1], [2], limit=9)
    engine.run()
    requests.append(engine.create_request())
    requests[-1].begin_turn([5], je.TurnOptions(9))
    for _ in range(3):
        assert [event.request for event in engine.run()] == requests


def test_B5_a_step_that_only_advances_a_prefill_gives_nothing_while_work_is_pending():
    engine, (request,) = engine_with([1] * 40, limit=1)
    for processed in (16, 32):
        assert engine.run() == []
        assert engine.has_pending_requests()
        assert request.processed_length == processed
    assert len(engine.run()) == 1
    assert engine.metrics.steps == 3
    assert not engine.has_pending_requests()


def test_B6_a_shortage_is_an_event_of_no_request_and_never_silence():
    engine, requests = engine_with([1] * 40, [2] * 40, limit=1)
    for _ in range(3):
        engine.run()
    assert requests[0].status == je.RequestStatus.TURN_COMPLETE
    before = engine.metrics
    for _ in range(2):
        (event,) = engine.run()
        assert event.request is None
        assert event.flags == je.EngineEventFlags.CAPACITY_BLOCKED
        assert event.error_code == je.EngineErrorCode.CAPACITY_DEFERRED
        assert event.detail
        assert engine.has_pending_requests()
    assert engine.metrics == before
    requests[0].close()
    while engine.has_pending_requests():
        engine.run()
    assert requests[1].tokens.tolist() == [2] * 40 + continuation([2] * 40, 1)


def test_B9_pending_means_retained_events_or_a_live_turn():
    engine = je.Engine(MODEL, SMALL)
    assert not engine.has_pending_requests()
    request = engine.create_request()
    assert not engine.has_pending_requests()
    turn = request.begin_turn([1], je.TurnOptions(1))
    assert engine.has_pending_requests()
    assert request.cancel_turn(turn)
    assert engine.has_pending_requests()
    assert len(engine.run()) == 1
    assert not engine.has_pending_requests()
    request.begin_turn([1], je.TurnOptions(1))
    engine.run()
    assert not engine.has_pending_requests()
    assert request.status == je.RequestStatus.TURN_COMPLETE


def test_B9_an_abandoned_request_is_reclaimed_before_the_answer():
    engine, requests = engine_with([1] * 40)
    engine.run()
    assert engine.has_pending_requests()
    requests.clear()
    assert not engine.has_pending_requests()
    assert engine.metrics.free_blocks == SMALL.num_blocks


def test_B10_commit_returns_its_events_and_leaves_them_in_the_queue():
    engine, _ = engine_with(*PROMPTS)
    state, events = je.step(MODEL, engine.state)
    assert state.control.events == events
    assert len(events) == 3
    state, drained = je.drain(state, 2)
    assert (drained, state.control.events) == (events[:2], events[2:])
    later, more = je.step(MODEL, state)
    assert later.control.events == events[2:] + more


# F1, F7: steps that fail


@pytest.mark.parametrize("bad", [NAN, ALL_MASKED])
def test_F7_case_C13_a_row_without_a_best_logit_ends_alone_after_its_retries(bad):
    engine, (good, broken, other) = engine_with([1, 2], [3, bad], [4], limit=3)
    collected = []
    while engine.has_pending_requests():
        collected += engine.run()
        je.check_invariants(engine.state)
    retryable = [event for event in collected if event.flags & je.EngineEventFlags.RETRYABLE]
    assert len(retryable) == SMALL.max_row_retries + 1 == engine.metrics.rolled_back_steps
    for event in retryable:
        assert event.request is None
        assert event.error_code == je.EngineErrorCode.RETRYABLE_EXECUTION
        assert f"request {broken.id}" in event.detail
    (failed,) = [event for event in collected if event.flags & je.EngineEventFlags.FAILED]
    assert (failed.request, failed.turn_id, failed.finish_reason) == (broken, 1, je.FinishReason.FAILED)
    assert failed.flags == je.EngineEventFlags.FAILED | je.EngineEventFlags.TURN_FINISHED
    assert "not finite" in failed.detail
    assert broken.tokens.tolist() == [3, bad]
    assert broken.status == je.RequestStatus.TURN_COMPLETE
    for request, prompt in ((good, [1, 2]), (other, [4])):
        assert request.tokens.tolist() == prompt + continuation(prompt, 3)
    broken.begin_turn([5], je.TurnOptions(1))
    engine.run()
    assert broken.tokens.tolist() == [3, bad, 5, next_token([3, bad, 5])]


def test_F7_no_retries_means_the_first_failure_ends_the_row():
    config = dataclasses.replace(SMALL, max_row_retries=0)
    engine, (broken,) = engine_with([NAN], config=config)
    assert [event.flags for event in engine.run()] == [
        je.EngineEventFlags.RETRYABLE,
        je.EngineEventFlags.FAILED | je.EngineEventFlags.TURN_FINISHED,
    ]
    assert broken.status == je.RequestStatus.TURN_COMPLETE


@pytest.mark.parametrize("failures", [1, 2])
def test_E2_F1_F6_F7_failures_that_pass_leave_no_trace(failures):
    engine, requests = engine_with(*PROMPTS, limit=4)
    good, bad = engine.model, with_params(engine.model, poison=True)
    collected = []
    for _ in range(4):
        engine._model = bad
        before = np.array([request.length for request in requests])
        for _ in range(failures):
            (event,) = engine.run()
            assert event.flags == je.EngineEventFlags.RETRYABLE
        assert np.array_equal(before, [request.length for request in requests])
        engine._model = good
        collected += engine.run()
    assert seen(collected) == expected(PROMPTS, 4)
    assert engine.metrics.rolled_back_steps == 4 * failures


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_E6_F7_logits_that_nothing_is_sampled_from_may_be_anything(chunk_size):
    """Where a prompt is cut must not decide whether it fails."""
    prompt = [1, NAN, 2, ALL_MASKED, 3]
    engine, (request,) = engine_with(prompt, config=dataclasses.replace(SMALL, chunk_size=chunk_size))
    while engine.has_pending_requests():
        assert not any(event.flags & je.EngineEventFlags.RETRYABLE for event in engine.run())
    assert request.tokens.tolist() == prompt + continuation(prompt, 2)
