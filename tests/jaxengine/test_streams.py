"""Iterators over events, plain and asynchronous: in order, one event a pull, nothing lost, ending cleanly (B8, A10,
A11)."""

import asyncio
import dataclasses
import gc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import LETTERS, NAN, continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

MODEL = toy_model()
STUCK = dataclasses.replace(SMALL, preemption="none")
"""Two requests of forty tokens need twenty of its sixteen blocks, and nobody makes room."""
PROMPTS = ([1, 2], [3, 4, 5], [6])
TOKENS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20)


def engine_with(*prompts, limit=3, config=SMALL):
    engine = je.Engine(MODEL, config)
    requests = [engine.create_request() for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    return engine, requests


def seen(events):
    return [
        (event.request and event.request.id, event.token, event.flags, event.finish_reason)
        for event in events
    ]


def by_run(*prompts, limit=3):
    engine, _requests = engine_with(*prompts, limit=limit)
    events = []
    while engine.has_pending_requests():
        events += engine.run()
    return seen(events)


def plainly(stream, most=None):
    """The first `most` events by a `for` that is then left."""
    found = []
    for event in stream:
        found.append(event)
        if len(found) == most:
            break
    return found


def asynchronously(stream, most=None):
    """The same by an `async for`."""

    async def collect():
        found = []
        async for event in stream:
            found.append(event)
            if len(found) == most:
                break
        return found

    return asyncio.run(collect())


class Reacting:
    """A stream whose reader calls something at each event, in either form of loop."""

    def __init__(self, stream, react):
        self.stream, self.react = stream, react

    def __iter__(self):
        for event in self.stream:
            self.react()
            yield event

    async def __aiter__(self):
        async for event in self.stream:
            self.react()
            yield event


both_forms = pytest.mark.parametrize("collect", [plainly, asynchronously])


# Order, and nothing lost


@both_forms
@given(prompts=st.lists(TOKENS, min_size=1, max_size=4), limit=st.integers(1, 4))
@settings(max_examples=15)
def test_B8_a_stream_gives_what_run_gives_and_leaves_nothing(collect, prompts, limit):
    engine, _requests = engine_with(*prompts, limit=limit)
    assert seen(collect(engine.stream())) == by_run(*prompts, limit=limit)
    assert not engine.has_pending_requests()
    assert collect(engine.stream()) == []


@both_forms
@pytest.mark.parametrize("most", range(1, 10))
@pytest.mark.parametrize("rest", ["run", "stream"])
def test_B8_leaving_a_stream_in_the_middle_loses_no_event(collect, most, rest):
    engine, _requests = engine_with(*PROMPTS)
    found = collect(engine.stream(), most)
    assert len(found) == most
    if rest == "stream":
        found += collect(engine.stream())
    while engine.has_pending_requests():
        found += engine.run(2)
    assert seen(found) == by_run(*PROMPTS)


@both_forms
@pytest.mark.parametrize("most", [1, 2, None])
def test_B8_a_requests_stream_leaves_the_others_events_retained_in_order(collect, most):
    engine, requests = engine_with(*PROMPTS)
    mine = collect(requests[1].stream(), most)
    assert [event.token for event in mine] == continuation(PROMPTS[1], 3)[:most]
    assert {event.request for event in mine} == {requests[1]}
    rest = []
    while engine.has_pending_requests():
        rest += engine.run()
    whole = by_run(*PROMPTS)
    left = [event for event in whole if event[0] != 2 or event not in seen(mine)]
    assert sorted(seen(rest)) == sorted(left)
    for request in requests:
        tokens = [event.token for event in rest if event.request is request]
        answer = continuation(PROMPTS[request.id - 1], 3)
        assert tokens == answer[3 - len(tokens) :]


def test_B8_the_streams_of_two_requests_interleave():
    _engine, (one, two, three) = engine_with(*PROMPTS)
    pairs = zip(one.stream(), three.stream(), strict=True)
    assert [(a.token, b.token) for a, b in pairs] == list(
        zip(continuation(PROMPTS[0], 3), continuation(PROMPTS[2], 3), strict=True)
    )
    assert [event.token for event in two.stream()] == continuation(PROMPTS[1], 3)


def test_B8_tasks_that_each_follow_a_request_take_turns():
    _engine, requests = engine_with(*PROMPTS)
    order = []

    async def follow(request):
        tokens = []
        async for event in request.stream():
            order.append(request.id)
            tokens.append(event.token)
        return tokens

    async def follow_all():
        return await asyncio.gather(*map(follow, requests))

    assert asyncio.run(follow_all()) == [continuation(prompt, 3) for prompt in PROMPTS]
    assert order == [1, 2, 3] * 3


def test_B8_other_tasks_run_between_steps_even_where_a_step_gives_no_event():
    """Forty tokens take three steps, the first two of which only advance the prefill."""
    engine, (request,) = engine_with([1] * 40, limit=3)
    lengths = []

    async def watch():
        while request.status != je.RequestStatus.TURN_COMPLETE:
            lengths.append(request.processed_length)
            await asyncio.sleep(0)

    async def serve():
        watching = asyncio.create_task(watch())
        tokens = [event.token async for event in engine.stream()]
        await watching
        return tokens

    assert asyncio.run(serve()) == continuation([1] * 40, 3)
    assert {16, 32, 40, 41} <= set(lengths)


def test_B8_a_turn_begun_in_the_loop_goes_on_in_it():
    _engine, (request,) = engine_with([1], limit=2)
    turns = []
    for event in request.stream():
        turns.append(event.turn_id)
        if event.flags & je.EngineEventFlags.TURN_FINISHED and event.turn_id < 3:
            request.begin_turn([2], je.TurnOptions(2))
    assert turns == [1, 1, 2, 2, 3, 3]


def test_B8_a_stream_over_a_request_without_a_turn_runs_nothing():
    engine, requests = engine_with([1])
    idle = engine.create_request()
    before = leaves(engine.state)
    assert list(idle.stream()) == []
    assert_same(before, leaves(engine.state))
    assert len(list(requests[0].stream())) == 3


# What belongs to nobody


@both_forms
@pytest.mark.parametrize("whose", ["engine", "request"])
def test_B6_B8_a_shortage_comes_through_and_can_be_answered_in_the_loop(collect, whose):
    engine, (first, second) = engine_with([1] * 40, [2] * 40, limit=1, config=STUCK)
    collect(first.stream())
    found = collect(Reacting(engine.stream() if whose == "engine" else second.stream(), first.close))
    assert [event.request for event in found] == [None, second]
    assert found[0].flags == je.EngineEventFlags.CAPACITY_BLOCKED
    assert second.tokens.tolist() == [2] * 40 + continuation([2] * 40, 1)


def test_B8_a_failing_requests_stream_tells_of_each_try_and_then_of_the_end():
    engine, (good, broken) = engine_with([1], [NAN])
    flags = [event.flags for event in broken.stream()]
    end = je.EngineEventFlags.FAILED | je.EngineEventFlags.TURN_FINISHED
    assert flags == [je.EngineEventFlags.RETRYABLE] * 3 + [end]
    assert [event.token for event in good.stream()] == continuation([1], 3)
    assert not engine.has_pending_requests()


def test_B8_a_finished_requests_stream_takes_no_event_of_the_engine():
    engine, (first, _second) = engine_with([1] * 40, [2] * 40, limit=1, config=STUCK)
    list(first.stream())
    plan = je.plan_step(engine.state)
    engine.apply(lambda state: (je.failures.after_blocked(state, plan), None))
    assert list(first.stream()) == []
    (event,) = engine.run()
    assert event.flags == je.EngineEventFlags.CAPACITY_BLOCKED


@both_forms
def test_B8_F3_a_stream_ends_with_the_turns_that_a_failure_ends(collect):
    engine, requests = engine_with(*PROMPTS)
    found = collect(engine.stream(), 3)
    with je.inject_fault(je.Stage.EXECUTE, RuntimeError("the device is gone")):
        found = collect(engine.stream())
    end = je.EngineEventFlags.FAILED | je.EngineEventFlags.TURN_FINISHED
    assert [(event.request, event.flags) for event in found] == [(request, end) for request in requests]
    assert collect(engine.stream()) == collect(requests[0].stream()) == []
    with pytest.raises(je.EngineError, match="the device is gone"):
        engine.run()


# Closing in the middle


def ends(events):
    """Nothing more comes."""
    return next(events, None) is None


@pytest.mark.parametrize("runs", [0, 1, 2, 3])
@pytest.mark.parametrize("pulls", [0, 1, 2, 3])
def test_A10_B8_closing_a_request_ends_its_iterators_whatever_it_was_doing(runs, pulls):
    """Queued, in its prefill, decoding, complete with events retained, complete; one run gives a prefill or nothing."""
    engine, (request, other) = engine_with([1] * 20, [2, 2], limit=2)
    stream, same = iter(request.stream()), iter(request.stream())
    taken = [event for _ in range(pulls) if (event := next(stream, None))]
    for _ in range(runs):
        engine.run(1)
    request.close()
    assert ends(stream)
    assert ends(same)
    assert ends(iter(request.stream()))
    assert [event.token for event in taken] == continuation([1] * 20, 2)[:pulls]
    assert {event.request for event in taken} <= {request}
    assert {event.request for event in engine.stream()} <= {other}
    assert other.tokens.tolist() == [2, 2, *continuation([2, 2], 2)]


def test_A10_B8_a_request_that_was_never_begun_can_be_closed_under_its_iterator():
    engine, _ = engine_with()
    request = engine.create_request()
    stream = iter(request.stream())
    request.close()
    assert ends(stream)


def test_B8_closing_a_request_in_the_loop_over_all_ends_its_part_only():
    engine, (one, two, three) = engine_with(*PROMPTS)
    found = []
    for event in engine.stream():
        found.append(event)
        two.close()
    assert len([event for event in found if event.request is two]) == 0
    assert [event.token for event in found if event.request is one] == continuation(PROMPTS[0], 3)
    assert [event.token for event in found if event.request is three] == continuation(PROMPTS[2], 3)


@both_forms
@pytest.mark.parametrize("end", ["close", "detach"])
@pytest.mark.parametrize("whose", ["engine", "request"])
def test_A12_B8_closing_the_engine_in_the_middle_ends_every_iterator(collect, end, whose):
    engine, requests = engine_with(*PROMPTS)
    streams = [engine.stream(), *[request.stream() for request in requests]]
    started = [iter(stream) for stream in streams]
    first = [next(events) for events in started[1:]]

    chosen = streams[0] if whose == "engine" else streams[1]
    assert len(collect(Reacting(chosen, getattr(engine, end)))) == 1
    assert all(map(ends, started))
    assert [event.token for event in first] == [continuation(prompt, 1)[0] for prompt in PROMPTS]
    assert {event.request.status for event in first} == {je.RequestStatus.CLOSED}


# Iterators and the last handle


def test_A11_a_suspended_iterator_over_a_request_keeps_it():
    engine, (request,) = engine_with([1])
    stream = iter(request.stream())
    next(stream)
    del request
    gc.collect()
    assert engine.has_pending_requests()
    assert [event.token for event in stream] == continuation([1], 3)[1:]


def test_A11_a_request_is_reclaimed_once_its_iterator_is_dropped_too():
    engine, (request,) = engine_with([1])
    stream = iter(request.stream())
    next(stream)
    del request, stream
    gc.collect()
    assert not engine.has_pending_requests()
    assert engine.metrics.residents == 0


def test_A11_an_iterator_over_the_engine_keeps_no_request():
    engine, requests = engine_with([1], [2])
    stream = iter(engine.stream())
    assert next(stream).request is requests[0]
    other = requests.pop()
    requests.clear()
    gc.collect()
    assert [event.request for event in stream] == [other] * 3
    assert engine.state.control.requests.id.tolist() == [other.id]


def test_A11_an_abandoned_asynchronous_iterator_lets_its_request_go():
    engine, requests = engine_with([1])

    async def leave():
        async for _ in requests.pop().stream():
            break

    asyncio.run(leave())
    gc.collect()
    assert not engine.has_pending_requests()
    assert engine.metrics.free_blocks == SMALL.num_blocks
