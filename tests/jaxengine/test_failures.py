"""Failures that an engine survives: who hears of them, and that nothing else has changed (F1, F2, F3, F5, F6, F7)."""

import contextlib
import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxengine as je
from jaxengine.logs import LogTable
from jaxengine.toy import NAN, continuation, with_params
from tests.jaxengine.breaking import KINDS, Code, Flags, Stage, breaking
from tests.jaxengine.harness import SMALL, assert_same, leaves
from tests.jaxengine.two_turns import (
    ENDS,
    LIMIT,
    MODEL,
    POLICIES,
    PROMPTS,
    require_healthy,
    run_out,
    started,
    told,
)


def armed(error_of):
    """The model, and a switch: while it holds True the forward pass raises what `error_of` returns."""
    broken = [False]
    return breaking(MODEL, lambda batch: error_of() if broken[0] else None), broken


# Failures that cost nothing


@POLICIES
@pytest.mark.parametrize("stage", [Stage.LOGITS, Stage.SAMPLE, Stage.VALIDATE])
def test_F1_a_failed_validation_or_sample_is_one_event_of_no_request_that_says_what_failed(stage, policy):
    engine, requests = started(failure_policy=policy)
    with je.inject_fault(stage, je.RetryableStepError("sensor three is wet")):
        (event,) = engine.run()
    assert told([event]) == [(None, Flags.RETRYABLE, Code.RETRYABLE_EXECUTION)]
    assert "sensor three is wet" in event.detail
    assert engine.metrics.rolled_back_steps == 1
    require_healthy(engine, requests)


def test_F1_execution_that_says_so_is_retryable_as_often_as_it_says_so():
    model, broken = armed(lambda: je.RetryableStepError("the link is down"))
    engine, requests = started(model)
    broken[0] = True
    for _ in range(SMALL.max_row_retries + 3):
        (event,) = engine.run()
        assert told([event]) == [(None, Flags.RETRYABLE, Code.RETRYABLE_EXECUTION)]
    broken[0] = False
    require_healthy(engine, requests)


def test_F1_F7_a_failure_that_names_nobody_live_counts_against_nobody():
    engine, requests = started()
    done = engine.create_request()
    done.begin_turn([9], je.TurnOptions(1))
    run_out(engine)
    requests[0].begin_turn([5], je.TurnOptions(2))
    before = engine.state.control.requests
    with je.inject_fault(Stage.SAMPLE, je.RetryableStepError("who?", (done.id, 99))):
        engine.run()
    for name, values in vars(before).items():
        np.testing.assert_array_equal(values, getattr(engine.state.control.requests, name))


def allocate_too_much():
    jnp.zeros(1 << 46).block_until_ready()


@POLICIES
def test_F2_memory_that_runs_out_on_the_device_is_capacity_of_its_own_kind(policy):
    """A real allocation that no machine can serve, so that XLA's own error is what is recognised."""

    def exhausted():
        try:
            allocate_too_much()
        except Exception as error:
            return error

    model, broken = armed(exhausted)
    engine, requests = started(model, failure_policy=policy)
    broken[0] = True
    for _ in range(3):
        (event,) = engine.run()
        assert told([event]) == [(None, Flags.CAPACITY_BLOCKED, Code.EXECUTION_CAPACITY_EXCEEDED)]
        assert "Out of memory" in event.detail
    broken[0] = False
    assert engine.metrics.rolled_back_steps == 3
    require_healthy(engine, requests)


@POLICIES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["pages", "block_table"])
def test_F2_F4_a_failure_that_takes_the_store_along_is_fatal_whatever_it_calls_itself(kind, part, policy):
    engine, _ = started(failure_policy=policy)

    def forward(params, pages, table, *others, **static):
        for array in pages if part == "pages" else [table]:
            array.delete()
        raise KINDS[kind]()

    class Taking:
        def __getattr__(self, name):
            return forward if name == "forward" else getattr(MODEL.programs, name)

    engine._model = dataclasses.replace(MODEL, programs=Taking())
    assert told(engine.run()) == [(n, ENDS, Code.ENGINE_EXECUTION_FAILURE) for n in (1, 2)]
    with pytest.raises(je.EngineError, match="took the KV pool with it"):
        engine.run()
    assert engine.metrics.steps == 1


def poisoned(array):
    """An array whose computation has failed, although its dispatch went well."""

    def fail(_):
        raise RuntimeError("a bit fell over")

    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    failing = jax.jit(lambda x: jax.pure_callback(fail, shape, x)).lower(jnp.zeros((700, 700))).compile()
    slow = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, lambda _, x: x @ x * 1e-3, x))
    # What fails before its dispatch has returned is told at once, so it is put behind ever slower work.
    for effort in range(5, 20):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return failing(slow(jnp.ones((700, 700)), 2**effort))
    pytest.fail("every dispatch waited for its result")


@POLICIES
def test_F2_E3_a_write_that_fails_after_it_was_dispatched_is_fatal_at_the_next_step(policy):
    """The device works behind the host's back: the commit has returned, and the pages turn out to be an error."""

    class Late:
        def __getattr__(self, name):
            return getattr(MODEL.programs, name)

        def publish(self, pages, table, fixed, *_, **static):
            return tuple(map(poisoned, pages)), table, fixed

    engine, _ = started(failure_policy=policy)
    engine._model = dataclasses.replace(MODEL, programs=Late())
    assert told(engine.run()) == [(n, Flags.TOKEN, Code.NONE) for n in (1, 2)]
    assert told(engine.run()) == [(n, ENDS, Code.ENGINE_EXECUTION_FAILURE) for n in (1, 2)]
    with pytest.raises(je.EngineError, match="took the KV pool with it"):
        engine.run()
    # JAX reports the last callback's failure once more at exit, unless another one has worked since.
    one = jax.ShapeDtypeStruct((), np.float32)
    jax.jit(lambda x: jax.pure_callback(np.negative, one, x))(jnp.ones(())).block_until_ready()


@POLICIES
@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("a policy that raises"), ValueError("x")]
)
def test_F3_what_planning_raises_reaches_the_caller_and_changes_nothing(error, policy):
    broken = [False]

    def rank(candidates):
        if broken[0]:
            raise error
        return je.decode_first(candidates)

    engine, requests = started(policy=rank, failure_policy=policy)
    before = leaves(engine.state)
    broken[0] = True
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            engine.run()
        assert caught.value is error
        assert_same(before, leaves(engine.state))
    broken[0] = False
    with je.inject_fault(Stage.PLAN, error), pytest.raises(type(error)):
        engine.run()
    assert_same(before, leaves(engine.state))
    require_healthy(engine, requests)


# Continuations and samples


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        ([], None, ValueError),
        ([99], None, ValueError),
        ([1] * 60, None, ValueError),
        ([[1]], None, ValueError),
        ([1], je.RequestOptions(), TypeError),
    ],
)
def test_F5_a_continuation_that_is_refused_changes_nothing(tokens, options, error):
    engine, requests = started()
    run_out(engine)
    before = leaves(engine.state)
    with pytest.raises(error):
        requests[0].begin_turn(tokens, options)
    assert_same(before, leaves(engine.state))


@pytest.mark.parametrize(
    "broken", [(LogTable, "extend"), (je.requests, "replace_rows"), (je.requests, "_digest")]
)
def test_F5_a_continuation_that_runs_out_of_memory_changes_nothing(broken, monkeypatch):
    engine, requests = started()
    run_out(engine)
    before = leaves(engine.state)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(*broken, fail)
        with pytest.raises(MemoryError):
            requests[0].begin_turn([6, 5])
    assert_same(before, leaves(engine.state))
    requests[0].begin_turn([6, 5], je.TurnOptions(2))
    run_out(engine)
    prefix = [*PROMPTS[0], *continuation(PROMPTS[0], LIMIT), 6, 5]
    assert requests[0].tokens.tolist() == prefix + continuation(prefix, 2)


def test_F6_F7_one_bad_sample_commits_nobodys_and_each_bad_row_has_its_own_count():
    engine, requests = started()
    bad = engine.create_request()
    bad.begin_turn([3, NAN])
    lengths = [request.length for request in requests]
    for _ in range(2):
        (event,) = engine.run()
        assert (event.flags, [request.length for request in requests]) == (Flags.RETRYABLE, lengths)
    late = engine.create_request()
    late.begin_turn([NAN])
    # The third failure of one, the first of the other.
    assert told(engine.run())[1:] == [(bad.id, ENDS, Code.RETRYABLE_EXECUTION)]
    assert [told(engine.run())[1:] for _ in range(2)] == [[], [(late.id, ENDS, Code.RETRYABLE_EXECUTION)]]
    require_healthy(engine, requests)


def test_F7_a_step_that_works_forgets_the_failures_before_it():
    engine, requests = started(steps=0)
    for _ in range(3):
        engine._model = with_params(MODEL, poison=True)
        for _ in range(SMALL.max_row_retries):
            assert told(engine.run()) == [(None, Flags.RETRYABLE, Code.RETRYABLE_EXECUTION)]
        engine._model = MODEL
        engine.run()
    require_healthy(engine, requests)


def test_F1_a_failure_that_is_over_keeps_nothing_alive():
    engine, requests = started()
    error = je.RetryableStepError("sensor three is wet")
    with je.inject_fault(Stage.SAMPLE, error):
        engine.run()
    gone = weakref.ref(error)
    del error
    gc.collect()
    assert gone() is None
    require_healthy(engine, requests)
