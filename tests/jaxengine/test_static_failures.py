"""A step of a static batch that fails costs what it costs in a dynamic one: nothing, a request or the engine."""

import dataclasses

import pytest

import jaxengine as je
from jaxengine.toy import NAN, continuation
from tests.jaxengine.harness import begun, finish, tokens_of
from tests.jaxengine.holding import MODEL, STATIC, Held, begin, events_of, occupied, runs

DONE = je.EngineEventFlags.TURN_FINISHED


@pytest.fixture
def engine():
    with Held() as engine:
        yield engine


STEP_STAGES = [stage for stage in je.Stage if stage not in (je.Stage.PLAN, je.Stage.PUBLISH)]


@pytest.mark.parametrize("stage", STEP_STAGES)
@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize(
    ("error", "flag"),
    [
        (je.RetryableStepError("try again"), je.EngineEventFlags.RETRYABLE),
        (MemoryError("no room"), je.EngineEventFlags.CAPACITY_BLOCKED),
    ],
)
def test_O1_F1_F2_a_step_that_fails_costs_nothing(engine, stage, skip, error, flag):
    """Be it the first of a batch, a later one, the recycling of a batch, or the first of the next batch."""
    prompts = [[1], [2], [3], [4]]
    members = begin(engine, *prompts)
    with je.inject_fault(stage, error, skip=skip) as fault:
        found = events_of(engine)
    assert fault.fired
    assert [event.flags for event in found if event.request is None] == [flag]
    assert [event.request.id for event in found if event.request] == [1, 2, 3, 1, 2, 3, 4, 4]
    for request, prompt in zip(members, prompts, strict=True):
        assert request.tokens.tolist() == prompt + continuation(prompt, 2)


@pytest.mark.parametrize("stage", [je.Stage.EXECUTE, je.Stage.PUBLISH])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_O1_F4_a_fatal_failure_ends_members_and_those_that_wait(engine, stage, skip):
    """The third write is the recycling, when the members' turns are over."""
    members = begin(engine, [1], [2], [3], [4])
    with je.inject_fault(stage, ValueError("broken"), skip=skip):
        events = events_of(engine)
    reason = "FAILED" if skip < 2 else "MAX_GENERATED_TOKENS"
    ended = [(event.request.id, event.finish_reason.name) for event in events if event.flags & DONE]
    assert ended == [(1, reason), (2, reason), (3, reason), (4, "FAILED")]
    with pytest.raises(je.EngineError, match="broken"):
        engine.run()
    for request in members:
        request.close()
    assert occupied(engine) == 0


def test_O1_F7_a_member_whose_logits_are_not_finite_fails_and_the_batch_forms_without_it():
    with Held(dataclasses.replace(STATIC, max_row_retries=1)) as engine:
        _, good = begin(engine, [NAN], [2])
        events = events_of(engine)
        assert [(e.request.id, e.finish_reason.name) for e in events if e.flags & DONE] == [
            (1, "FAILED"),
            (2, "MAX_GENERATED_TOKENS"),
        ]
        assert good.tokens.tolist() == [2, *continuation([2], 2)]
        assert occupied(engine) == 1


def test_O1_F9_isolation_tries_a_static_batch_in_parts():
    """Two failures of the whole batch and one of its first half, which is request 1."""
    config = dataclasses.replace(STATIC, failure_policy="isolate")
    with Held(config) as engine:
        members = begin(engine, [1], [2], [3])
        faults = [je.inject_fault(je.Stage.EXECUTE, ValueError("broken")) for _ in range(3)]
        with faults[0], faults[1], faults[2]:
            found = [event for _ in range(3) for event in engine.run(1)]
            assert [event.request and event.request.id for event in found] == [None] * 3
            (failed,) = engine.run()
        assert (failed.request.id, failed.finish_reason) == (1, je.FinishReason.FAILED)
        assert runs(engine) == [[2, 3]] * 2
        assert [request.length for request in members] == [1, 3, 3]


def test_O1_D4_a_step_outlives_the_closing_of_another_member_but_not_of_its_own():
    state = begun(MODEL, [1], [2], [3], limit=1, config=STATIC)
    state, request_id = je.create_request(state)
    state, _ = je.step(MODEL, state)
    state, _ = je.drain(state, 9)
    state, _ = je.begin_turn(state, request_id, [4], je.TurnOptions(2))
    recycling = je.execute(MODEL, state, je.plan_step(state))
    assert recycling.plan.evicted.tolist() == [1, 2, 3]
    with pytest.raises(je.StaleTransactionError, match="request 2 changed"):
        je.commit(je.close_request(state, 2), recycling)
    state, events = je.commit(state, recycling)
    assert events == ()
    forming = je.execute(MODEL, state, je.plan_step(state))
    state, _ = je.commit(je.close_request(state, 2), forming)
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 4) == [4, *continuation([4], 2)]
