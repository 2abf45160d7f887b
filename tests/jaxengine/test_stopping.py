"""Failures that stop an engine: every live turn ends once, what was committed comes first, closing still works (F4)."""

import asyncio
import dataclasses
import gc
import os
import signal
import weakref

import numpy as np
import pytest

import jaxengine as je
from jaxengine import bookkeeping, planning, transaction
from jaxengine import engine as engine_module
from jaxengine.toy import continuation
from tests.jaxengine.breaking import Code, Flags, Stage
from tests.jaxengine.harness import SMALL, assert_same, begun, leaves
from tests.jaxengine.two_turns import (
    ENDS,
    LIMIT,
    MODEL,
    POLICIES,
    PROMPTS,
    require_finished,
    run_out,
    started,
    told,
)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A process that was started in the background ignores SIGINT from birth."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Failures that stop the engine


def replaced(**values):
    """A planner that lies about some fields of its plan."""

    def plan_step(state):
        plan = planning.plan_step(state)
        return dataclasses.replace(plan, **{name: value(plan) for name, value in values.items()})

    return plan_step


LIES = {
    "outcome": replaced(outcome=lambda plan: je.StepOutcome.RETRYABLE_BATCH_ABORT),
    "too few blocks": replaced(reserved=lambda plan: plan.reserved[:-1]),
    "fewer blocks than tokens": replaced(
        reserved=lambda plan: plan.reserved[:0], num_reserved=lambda plan: plan.num_reserved * 0
    ),
    "blocks dealt to the wrong row": replaced(
        num_reserved=lambda plan: plan.num_reserved + np.array([-1, 1])
    ),
    "blocks of others": replaced(reserved=lambda plan: plan.reserved * 0),
    "blocks out of order": replaced(reserved=lambda plan: plan.reserved[::-1]),
    "too many tokens": replaced(num_tokens=lambda plan: plan.num_tokens + 50),
    "stale pool": replaced(free_blocks=lambda plan: plan.free_blocks[1:]),
}


@POLICIES
@pytest.mark.parametrize("lie", LIES)
def test_F4_D3_a_plan_that_does_not_fit_its_state_is_a_contract_failure(lie, policy, monkeypatch):
    engine, _ = started(steps=0, failure_policy=policy)
    before = leaves(engine.state)
    monkeypatch.setattr(engine_module, "plan_step", LIES[lie])
    kept = engine.state
    assert told(engine.run()) == [(n, ENDS, Code.ENGINE_CONTRACT_FAILURE) for n in (1, 2)]
    assert_same(before, leaves(kept))
    with pytest.raises(je.EngineError) as caught:
        engine.run()
    assert isinstance(caught.value.__cause__, je.ContractError)


FATAL = [
    *[(stage, Code.ENGINE_EXECUTION_FAILURE) for stage in Stage if stage not in (Stage.PLAN, Stage.RESERVE)],
    (Stage.RESERVE, Code.ENGINE_CONTRACT_FAILURE),
]


@pytest.mark.parametrize(("stage", "code"), FATAL)
def test_F4_an_unknown_failure_ends_every_live_turn_once_and_then_raises(stage, code):
    engine, (one, two) = started()
    done = engine.create_request()
    done.begin_turn([9], je.TurnOptions(1))
    waiting = engine.create_request()
    idle = engine.create_request()
    engine.run()
    waiting.begin_turn([8], je.TurnOptions(2))
    error = RuntimeError("who knows")
    with je.inject_fault(stage, error):
        events = engine.run(1)
        while engine.has_pending_requests():
            with pytest.raises(je.EngineError, match="who knows"):
                engine.run(0)
            events += engine.run(1)
    assert told(events) == [(r.id, ENDS, code) for r in (one, two, waiting)]
    for event, turn in zip(events, ((5, 2), (2, 2), (1, 0)), strict=True):
        assert event.finish_reason is je.FinishReason.FAILED
        assert "who knows" in event.detail
        assert (event.usage.prompt_tokens, event.usage.generated_tokens) == turn
    for count in (0, 1, 64, 1):
        with pytest.raises(je.EngineError, match="who knows") as caught:
            engine.run(count)
        assert isinstance(caught.value.__cause__, je.StepError)
        assert caught.value.__cause__.__cause__ is error
        assert not engine.has_pending_requests()
    # Questions and closing work, new work doesn't.
    assert (done.status, idle.status) == (je.RequestStatus.TURN_COMPLETE, je.RequestStatus.CREATED)
    assert one.tokens.tolist() == PROMPTS[0] + continuation(PROMPTS[0], 2)
    assert one.processed_length == one.length - 1
    assert engine.metrics.rolled_back_steps == 1
    assert not one.cancel_turn(1)
    before = leaves(engine.state) if stage is not Stage.PUBLISH else None
    for work in (engine.create_request, lambda: one.begin_turn([1]), lambda: idle.begin_turn([1])):
        with pytest.raises(je.EngineError, match="who knows"):
            work()
    if before is not None:
        assert_same(before, leaves(engine.state))
    for request in (one, two, done, waiting, idle):
        request.close()
    assert not engine.has_pending_requests()
    assert len(engine.state.control.requests) == 0
    assert engine.metrics.free_blocks == SMALL.num_blocks
    engine.close()


def test_F4_committed_output_comes_before_the_failure():
    """One request is iterated, so the other's output is still retained when the step fails."""
    engine, (one, two) = started(steps=0)
    stream = iter(one.stream())
    assert next(stream).token == continuation(PROMPTS[0], 1)[0]
    with je.inject_fault(Stage.EXECUTE, RuntimeError("who knows")):
        failed = next(stream)
    assert told([failed]) == [(one.id, ENDS, Code.ENGINE_EXECUTION_FAILURE)]
    assert list(stream) == []
    with pytest.raises(je.EngineError):
        engine.run(0)
    (output,) = engine.run(1)
    assert (output.request, output.token) == (two, continuation(PROMPTS[1], 1)[0])
    assert told(engine.run()) == [(two.id, ENDS, Code.ENGINE_EXECUTION_FAILURE)]
    with pytest.raises(je.EngineError):
        engine.run()


@POLICIES
def test_F4_with_nothing_live_the_failure_is_one_event_of_no_request(policy):
    engine, requests = started(failure_policy=policy)
    run_out(engine)
    with je.inject_fault(Stage.PLAN, je.ContractError("two owners of a block")):
        (event,) = engine.run()
    assert told([event]) == [(None, Flags.FAILED, Code.ENGINE_CONTRACT_FAILURE)]
    assert not engine.has_pending_requests()
    with pytest.raises(je.EngineError, match="two owners"):
        engine.run()
    require_finished(requests)


def test_F4_iterators_over_everything_end_with_the_failure_events():
    for iterate in (list, lambda stream: asyncio.run(collected(stream))):
        engine, _ = started()
        with je.inject_fault(Stage.EXECUTE, RuntimeError("who knows")):
            events = iterate(engine.stream())
        assert told(events) == [(n, ENDS, Code.ENGINE_EXECUTION_FAILURE) for n in (1, 2)]


async def collected(stream):
    return [event async for event in stream]


def test_F4_a_stopped_state_stays_stopped_wherever_it_is_attached():
    engine, _ = started()
    with je.inject_fault(Stage.EXECUTE, RuntimeError("who knows")):
        engine.run(1)
    state = engine.detach()
    other = je.Engine(MODEL, SMALL)
    other.detach()
    handles = other.attach(state)
    assert told(other.run()) == [(2, ENDS, Code.ENGINE_EXECUTION_FAILURE)]
    with pytest.raises(je.EngineError, match="who knows"):
        other.run()
    assert set(handles) == {1, 2}
    # The first engine is rid of it.
    handles = engine.attach(begun(MODEL, [1], limit=1))
    assert [event.token for event in engine.run()] == continuation([1], 1)


# What a failure leaves in memory


def test_F4_closing_a_stopped_engine_frees_its_pages():
    """The stored error knows the frames that it passed, and they know the pages."""
    engine, _ = started()
    with je.inject_fault(Stage.BOOKKEEPING, RuntimeError("who knows")):
        engine.run()
    pages = weakref.ref(engine.state.store.pages[0])
    engine.close()
    gc.collect()
    assert pages() is None


# Ctrl-C and closing


def interrupting_at(stage, monkeypatch):
    """Sends a Ctrl-C whenever a step comes to `stage`, before a fault there is raised."""

    def reach(at):
        if at is stage:
            os.kill(os.getpid(), signal.SIGINT)
        je.faults.reach(at)

    for module in (planning, transaction, bookkeeping):
        monkeypatch.setattr(module, "reach", reach)


@pytest.mark.parametrize("stage", Stage)
def test_E2_F8_a_ctrl_c_at_any_stage_loses_no_token_and_repeats_none(stage, monkeypatch):
    engine, requests = started(steps=0)
    seen = {request: [] for request in requests}
    for turn in range(20):
        with monkeypatch.context() as patch:
            if turn % 2 == 0 and engine.has_pending_requests() and not engine.state.control.events:
                interrupting_at(stage, patch)
                with pytest.raises(KeyboardInterrupt):
                    engine.run()
                continue
        for event in engine.run():
            seen[event.request].append(event.token)
        je.check_invariants(engine.state)
    assert [seen[request] for request in requests] == [continuation(prompt, LIMIT) for prompt in PROMPTS]
    require_finished(requests)


@POLICIES
def test_F4_a_ctrl_c_does_not_hide_that_the_store_was_lost(policy, monkeypatch):
    engine, _ = started(failure_policy=policy)
    interrupting_at(Stage.VALIDATE, monkeypatch)
    with je.inject_fault(Stage.PUBLISH, RuntimeError("half written")), pytest.raises(KeyboardInterrupt):
        engine.run()
    monkeypatch.undo()
    assert told(engine.run()) == [(n, ENDS, Code.ENGINE_EXECUTION_FAILURE) for n in (1, 2)]
    with pytest.raises(je.EngineError, match="half written"):
        engine.run()


@pytest.mark.parametrize("stage", Stage)
def test_A12_F4_closing_passes_no_stage_and_leaves_an_error_as_it_is(stage):
    with je.inject_fault(stage, RuntimeError("who knows")) as fault:
        engine, requests = started(steps=0)
        requests[0].close()
        del requests
        assert not engine.has_pending_requests()
        engine.close()
        assert not fault.fired
    with je.inject_fault(Stage.EXECUTE, RuntimeError("who knows")):
        engine, requests = started()
        with pytest.raises(je.EngineError, match="who knows"), engine:
            run_for_ever(engine)
        assert not engine.has_state
        assert requests[0].status == je.RequestStatus.CLOSED


def run_for_ever(engine):
    while True:
        engine.run()
