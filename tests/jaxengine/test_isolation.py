"""`failure_policy="isolate"`: who fails alone ends, and the others have the tokens they would have had (F9).

The oracle knows who is poisonous and from which length on, and `continuation` says everybody's tokens. So it also knows
how far a poisonous request gets, and that two which only fail together both finish.
"""

import dataclasses
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

import jaxengine as je
from jaxengine import bookkeeping
from jaxengine.toy import LETTERS, continuation, toy_model
from tests.jaxengine.breaking import Code, Flags, Stage, breaking, raising_for
from tests.jaxengine.harness import SMALL
from tests.jaxengine.two_turns import ENDS, run_out, told

MODEL = toy_model()
ISOLATE = dataclasses.replace(SMALL, failure_policy="isolate")
CONFIGS = {
    "whole prompts": ISOLATE,
    "chunks": dataclasses.replace(ISOLATE, chunk_size=3),
    "two rows": dataclasses.replace(ISOLATE, max_batch_size=2),
    "short of blocks": dataclasses.replace(ISOLATE, num_blocks=6),
    "impatient": dataclasses.replace(ISOLATE, fairness_bound=2, num_blocks=8),
    "static": dataclasses.replace(ISOLATE, batching="static", num_blocks=None, block_size=16),
}
LIMIT = 5
RETRYABLE = (None, Flags.RETRYABLE, Code.RETRYABLE_EXECUTION)


def engine_with(prompts, breaks, config=ISOLATE, limit=LIMIT):
    """An engine, its requests, and the batches that its forward pass was given, in order."""
    batches = []

    def seen(batch):
        batches.append(sorted(batch))
        return breaks(batch)

    engine = je.Engine(breaking(MODEL, seen), config)
    requests = [engine.create_request() for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    return engine, requests, batches


def any_of(*breaks):
    return lambda batch: next(filter(None, (each(batch) for each in breaks)), None)


def answered(request, prompt, count=LIMIT):
    return request.tokens.tolist() == prompt + continuation(prompt, count)


# Who fails


@pytest.mark.slow
@settings(max_examples=120)
@given(
    prompts=st.lists(st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=10), min_size=1, max_size=7),
    arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7),
    alone=st.dictionaries(st.integers(1, 7), st.integers(0, 15), max_size=3),
    pairs=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(0, 15)), max_size=3),
    config=st.sampled_from(sorted(CONFIGS)),
)
@example([[1, 2]] * 4, [0] * 7, {}, list(itertools.product(range(1, 5), range(1, 5), [0])), "whole prompts")
@example([[1, 2]] * 4, [0] * 7, dict.fromkeys(range(1, 5), 0), [], "whole prompts")
@example([[1, 2]] * 4, [0] * 7, dict.fromkeys(range(1, 5), 4), [], "short of blocks")
@example([[1] * 9, [2] * 9], [0, 2] * 3 + [0], {1: 5}, [], "chunks")
def test_F9_who_fails_alone_ends_and_everybody_else_gets_every_token(prompts, arrivals, alone, pairs, config):
    """Poison of the first token, in the middle of a prompt and of a generation; arrivals meanwhile; twos that fail."""
    pairs = [(one, other, since) for one, other, since in pairs if one != other]
    breaks = any_of(
        *(raising_for(request_id, since=since) for request_id, since in alone.items()),
        *(raising_for(one, other, since=since) for one, other, since in pairs),
    )
    engine, _, _ = engine_with([], breaks, CONFIGS[config])
    order = sorted(range(len(prompts)), key=lambda nth: arrivals[nth])
    waiting = dict(enumerate(order, 1))
    requests, ends = {}, {}
    for clock in itertools.count():
        assert clock < 600, "it goes on for ever"
        for request_id, nth in list(waiting.items()):
            if arrivals[nth] <= clock:
                requests[request_id] = engine.create_request()
                requests[request_id].begin_turn(prompts[nth], je.TurnOptions(LIMIT))
                del waiting[request_id]
        for event in engine.run():
            if event.request is None:
                assert told([event]) == [RETRYABLE]
                assert "poison" in event.detail
            elif Flags.TURN_FINISHED in event.flags:
                assert event.request.id not in ends
                ends[event.request.id] = (told([event]), event.request.tokens.tolist())
                event.request.close()
        je.check_invariants(engine.state)
        if not waiting and not engine.has_pending_requests():
            break
    for request_id, nth in enumerate(order, 1):
        prompt = prompts[nth]
        reached = max(alone.get(request_id, 99) - len(prompt), 0)
        failed = reached < LIMIT
        assert ends[request_id] == (
            [(request_id, ENDS, Code.ENGINE_EXECUTION_FAILURE)]
            if failed
            else [(request_id, Flags.TOKEN | Flags.TURN_FINISHED, Code.NONE)],
            prompt + continuation(prompt, min(reached, LIMIT)),
        )
    assert engine.state.control.suspects == ()
    assert engine.state.control.failure is None


def test_F9_the_step_is_retried_then_halved_until_one_is_left():
    prompts = [[n, n] for n in range(4)]
    engine, requests, batches = engine_with(prompts, raising_for(3))
    events = []
    while not any(Flags.TURN_FINISHED in event.flags for event in events):
        events += engine.run()
    assert batches == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [3, 4], [3]]
    assert told(events) == [
        RETRYABLE,
        RETRYABLE,
        (1, Flags.TOKEN, Code.NONE),
        (2, Flags.TOKEN, Code.NONE),
        RETRYABLE,
        RETRYABLE,
        (3, ENDS, Code.ENGINE_EXECUTION_FAILURE),
    ]
    assert "poison" in events[-1].detail
    assert engine.metrics.rolled_back_steps == 4
    run_out(engine)
    assert batches[5:8] == [[4], [1, 2, 4], [1, 2, 4]]
    assert requests[2].tokens.tolist() == prompts[2]
    for nth in (0, 1, 3):
        assert answered(requests[nth], prompts[nth])


def test_F9_an_error_that_passes_costs_one_retry_and_nobody():
    engine, requests, batches = engine_with([[1, 2], [3]], lambda batch: None)
    engine.run()
    with je.inject_fault(Stage.LOGITS, RuntimeError("who knows")):
        assert told(engine.run()) == [RETRYABLE]
    assert engine.state.control.suspects == ((1, 2),)
    engine.run()
    assert batches == [[1, 2]] * 3
    assert engine.state.control.suspects == ()
    run_out(engine)
    assert answered(requests[0], [1, 2])
    assert answered(requests[1], [3])


def test_F9_a_request_that_failed_once_has_its_retry_again_in_its_next_turn():
    engine, (request,), batches = engine_with([[1, 2]], raising_for(1))
    for turn in range(1, 4):
        assert told(run_out(engine)) == [RETRYABLE, RETRYABLE, (1, ENDS, Code.ENGINE_EXECUTION_FAILURE)]
        assert len(batches) == 2 * turn
        assert request.status == je.RequestStatus.TURN_COMPLETE
        request.begin_turn([turn])


def test_F9_two_that_fail_only_together_take_turns_to_the_end():
    prompts = [[1, 2], [3, 4, 5]]
    engine, requests, batches = engine_with(prompts, raising_for(1, 2))
    events = run_out(engine)
    assert not any(Flags.FAILED in event.flags for event in events)
    for request, prompt in zip(requests, prompts, strict=True):
        assert answered(request, prompt)
    # A token each costs two steps in vain.
    assert batches == [[1, 2], [1, 2], [1], [2]] * LIMIT


@pytest.mark.parametrize("leave", ["cancel", "close", "drop"])
@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("who", range(4))
def test_F9_a_suspect_may_leave_at_any_time(leave, after, who):
    """The others go on, the poison of whoever is left is found, and nobody stays suspected."""
    prompts = [[n, n] for n in range(4)]
    engine, requests, _ = engine_with(prompts, raising_for(2))
    events = []
    for _ in range(after):
        events += engine.run()
    if leave == "cancel":
        requests[who].cancel_turn(1)
    elif leave == "close":
        requests[who].close()
    events = [event for event in events if event.request is not requests[who]]
    gone, requests[who] = (requests[who] if leave == "cancel" else None), None
    events += run_out(engine)
    assert engine.state.control.suspects == ()
    failed = [event.request.id for event in events if Flags.FAILED in event.flags]
    assert failed == ([] if who == 1 and after < 5 else [2])
    if gone is not None:
        assert gone.status == je.RequestStatus.TURN_COMPLETE
    for nth in {0, 2, 3} - {who}:
        assert answered(requests[nth], prompts[nth])


def test_F9_whoever_comes_during_the_search_waits_for_its_end():
    engine, requests, batches = engine_with([[1], [2]], raising_for(2))
    engine.run()
    late = engine.create_request()
    late.begin_turn([3], je.TurnOptions(LIMIT))
    run_out(engine)
    assert batches[:6] == [[1, 2], [1, 2], [1], [2], [1, 3], [1, 3]]
    assert answered(requests[0], [1])
    assert answered(late, [3])


# Steps without rows


@pytest.mark.parametrize("stage", [Stage.VALIDATE, Stage.BOOKKEEPING, Stage.EVENTS])
def test_F9_a_step_without_rows_is_retried_too_and_then_stops_the_engine(stage):
    """It only ends requests that no pool can serve: nobody is there to be tried alone."""
    config = dataclasses.replace(ISOLATE, num_blocks=2)
    end = [(n, ENDS, Code.REQUEST_UNSERVICEABLE) for n in (1, 2)]
    for times in (1, 2):
        engine, requests, batches = engine_with([[1] * 9, [2] * 9], lambda batch: None, config)
        with je.inject_fault(stage, RuntimeError("one")):
            assert told(engine.run()) == [RETRYABLE]
        if times == 1:
            assert told(engine.run()) == end
            assert engine.state.control.suspects == ()
            third = engine.create_request()
            third.begin_turn([1], je.TurnOptions(LIMIT))
            run_out(engine)
            assert answered(third, [1])
        else:
            with je.inject_fault(stage, RuntimeError("two")):
                assert told(engine.run()) == [(n, ENDS, Code.ENGINE_EXECUTION_FAILURE) for n in (1, 2)]
            with pytest.raises(je.EngineError, match="two"):
                engine.run()
        del requests, batches


# What is no business of a request


@pytest.mark.parametrize("error", [MemoryError("no room"), je.RetryableStepError("try again")])
def test_F9_F2_known_failures_between_unknown_ones_neither_help_nor_hurt(error):
    """A step that is out of memory says nothing of who is poisonous."""
    count = itertools.count()

    def breaks(batch):
        return error if next(count) % 2 else raising_for(2)(batch)

    engine, (one, two), _ = engine_with([[1], [2]], breaks)
    events = []
    while engine.has_pending_requests():
        events += engine.run()
        je.check_invariants(engine.state)
    assert [event.request.id for event in events if Flags.FAILED in event.flags] == [two.id]
    assert answered(one, [1])


def test_F9_F7_a_search_and_rows_without_a_best_logit_at_once():
    engine, requests, _ = engine_with([[1], [je.toy.NAN], [3], [4]], raising_for(4))
    failed = {e.request.id: e.error_code for e in run_out(engine) if Flags.FAILED in e.flags}
    assert failed == {2: Code.RETRYABLE_EXECUTION, 4: Code.ENGINE_EXECUTION_FAILURE}
    assert answered(requests[0], [1])
    assert answered(requests[2], [3])


def test_F9_the_step_is_rolled_back_whatever_failed_after_the_forward_pass(monkeypatch):
    """Poison of the bookkeeping: the same search, although the device had done its work."""
    real = bookkeeping._with_tokens

    def with_tokens(control, index, settled):
        if 2 in control.requests.id[index]:
            raise RuntimeError("poison")
        return real(control, index, settled)

    monkeypatch.setattr(bookkeeping, "_with_tokens", with_tokens)
    engine, (one, two, three), batches = engine_with([[1], [2], [3]], lambda batch: None)
    failed = [event.request.id for event in run_out(engine) if Flags.FAILED in event.flags]
    assert failed == [2]
    assert two.length == 1
    assert batches[:6] == [[1, 2, 3], [1, 2, 3], [1], [2, 3], [2], [3]]
    assert answered(one, [1])
    assert answered(three, [3])
    assert np.all(engine.state.control.requests.failures == 0)
