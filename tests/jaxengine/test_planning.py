"""What a step runs: candidates and their order, the two limits, growth, shortage and layout (C1 to C8).

Examples of each rule; `test_commands.py` compares whole plans with a plain-Python planner.
"""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.requests import status_of
from jaxengine.toy import CONTEXT, LETTERS, continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, column, finish, leaves, tokens_of
from tests.jaxengine.naive import NaiveEngine

MODEL = toy_model()
LARGE = dataclasses.replace(SMALL, max_batch_size=8, max_scheduled_tokens=64, num_blocks=64)
"""For plans that are not executed, so that nothing is compiled for it."""


def shares(state):
    return [(row.request_id, row.num_tokens) for row in je.plan_step(state).rows]


def stepped(state, steps=1):
    for _ in range(steps):
        state, _ = je.step(MODEL, state)
        state, _ = je.drain(state, 99)
    return state


def submitted(state, prompt, limit=0):
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(limit))
    return state


# C1: candidates


def test_C1_decodes_come_first_then_resident_prefills_then_waiting_ones_in_order_of_submission():
    state = begun(MODEL, [1], [2], limit=5)
    state = stepped(state)
    state = submitted(state, [3] * 20)
    state = stepped(state)
    state = submitted(state, [4] * 5)
    assert shares(state) == [(1, 1), (2, 1), (3, 6), (4, 5)]


def test_C1_waiting_requests_go_by_submission_and_not_by_creation():
    state = je.init_state(MODEL, SMALL)
    for _ in range(3):
        state, _ = je.create_request(state)
    for request_id in (3, 1, 2):
        state, _ = je.begin_turn(state, request_id, [request_id])
    assert [request_id for request_id, _ in shares(state)] == [3, 1, 2]


def test_C1_a_one_token_continuation_is_a_prefill_and_keeps_its_resident_order():
    state = begun(MODEL, [1], [2], [3], limit=1)
    state = stepped(state)
    for request_id in (3, 1):
        state, _ = je.begin_turn(state, request_id, [5], je.TurnOptions(4))
    assert [row.is_prefill for row in je.plan_step(state).rows] == [True, True]
    assert shares(state) == [(1, 2), (3, 2)]
    state, events = je.step(MODEL, state)
    assert [event.request_id for event in events] == [1, 3]


def test_C1_after_eos_the_next_turns_single_token_is_a_prefill():
    model = toy_model(eos=continuation([1], 1))
    state, _ = finish(model, begun(model, [1]))
    state, _ = je.begin_turn(state, 1, [2])
    (row,) = je.plan_step(state).rows
    assert (row.num_tokens, row.is_prefill, row.is_new) == (1, True, False)


def test_C1_A9_complete_residents_are_skipped_and_keep_their_places():
    state = begun(MODEL, [1], [2], [3], [4], limit=1)
    state = stepped(state)
    assert je.plan_step(state).outcome == je.StepOutcome.NO_WORK
    state = submitted(state, [5])
    assert je.plan_step(state).outcome == je.StepOutcome.CAPACITY_DEFERRED
    state = je.close_request(state, 2)
    (row,) = je.plan_step(state).rows
    assert (row.request_id, row.is_new) == (5, True)
    state, _ = je.begin_turn(state, 4, [1])
    assert [request_id for request_id, _ in shares(state)] == [4, 5]


# C2: two limits


@given(
    prompts=st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=10),
    rows=st.integers(1, 8),
    tokens=st.integers(1, 64),
    chunk=st.sampled_from([None, 1, 5, 100]),
)
@settings(max_examples=100)
def test_C2_C3_no_step_has_more_rows_or_tokens_than_allowed_and_none_left_unused_without_reason(
    prompts, rows, tokens, chunk
):
    config = je.EngineConfig(rows, tokens, num_blocks=1000, block_size=4, chunk_size=chunk)
    state = begun(MODEL, *([1] * count for count in prompts), config=config)
    planned = shares(state)
    assert len(planned) == min(len(prompts), rows, tokens)
    total = sum(count for _, count in planned)
    assert total <= tokens
    longest = chunk or CONTEXT
    assert all(1 <= count <= min(prompts[request_id - 1], longest) for request_id, count in planned)
    wanted = sum(min(prompts[request_id - 1], longest) for request_id, _ in planned)
    assert total == min(wanted, tokens)
    grown = [count == min(prompts[request_id - 1], longest) for request_id, count in planned]
    first_short = grown.index(False) if False in grown else len(grown)
    assert all(count == 1 for _, count in planned[first_short + 1 :])


def test_C2_the_default_budget_is_2048_tokens():
    assert je.EngineConfig().max_scheduled_tokens == 2048


def test_C2_residents_and_admissions_together_stay_within_the_batch():
    state = begun(MODEL, [1], [2], [3], limit=1)
    state = stepped(state)
    state = submitted(submitted(state, [4]), [5])
    plan = je.plan_step(state)
    assert ([row.request_id for row in plan.rows], plan.deferred) == ([4], 1)


# C3: growth


def test_C3_every_row_gets_one_token_before_any_prefill_grows():
    config = dataclasses.replace(LARGE, max_scheduled_tokens=10)
    assert shares(begun(MODEL, [1] * 30, [2] * 3, [3] * 2, config=config)) == [(1, 8), (2, 1), (3, 1)]
    config = dataclasses.replace(config, chunk_size=4)
    assert shares(begun(MODEL, [1] * 30, [2] * 3, [3] * 2, config=config)) == [(1, 4), (2, 3), (3, 2)]


def test_C3_a_budget_of_one_token_goes_to_the_decode():
    config = dataclasses.replace(SMALL, max_scheduled_tokens=1)
    state = stepped(begun(MODEL, [1], [2], config=config))
    assert shares(state) == [(1, 1)]


# C4: skip and go on


def test_C4_a_prefill_that_does_not_fit_hides_no_smaller_one():
    state = begun(MODEL, [1] * 40, [2] * 50, [3] * 8, limit=1)
    plan = je.plan_step(state)
    assert [row.request_id for row in plan.rows] == [1, 3]
    assert plan.deferred == 1


def test_C4_residents_are_matched_by_identity_when_earlier_ones_are_gone():
    state = begun(MODEL, [1] * 2, [2] * 3, [3] * 4, limit=6)
    state = stepped(state, 2)
    state = je.close_request(state, 1)
    state = submitted(state, [9, 9], limit=6)
    state, _ = finish(MODEL, state)
    for request_id, prompt in ((2, [2] * 3), (3, [3] * 4), (4, [9, 9])):
        assert tokens_of(state, request_id) == prompt + continuation(prompt, 6)


# C5: reservation


def test_C5_admission_reserves_for_the_whole_input_and_runs_a_part():
    config = dataclasses.replace(SMALL, chunk_size=3)
    state = begun(MODEL, [1] * 18, config=config)
    (row,) = je.plan_step(state).rows
    assert (row.num_tokens, len(row.block_ids)) == (3, 5)
    state, _ = je.step(MODEL, state)
    assert column(state, 1, "processed") == 3
    assert len(state.control.free_blocks) == SMALL.num_blocks - 5
    (row,) = je.plan_step(state).rows
    assert (row.num_tokens, row.block_ids) == (3, ())


def test_C5_a_continuation_reserves_for_its_whole_input_too():
    state = stepped(begun(MODEL, [1] * 4, limit=1))
    state, _ = je.begin_turn(state, 1, [2] * 20)
    (row,) = je.plan_step(state).rows
    assert (row.num_tokens, len(row.block_ids)) == (16, 6)


def test_C5_a_deferred_resident_keeps_its_table_and_status():
    state = begun(MODEL, [1] * 30, [2] * 32, limit=1)
    state = stepped(state, 5)
    state, _ = je.begin_turn(state, 1, [3] * 20)
    before = leaves(state)
    plan = je.plan_step(state)
    assert (plan.outcome, plan.deferred) == (je.StepOutcome.CAPACITY_DEFERRED, 1)
    after, events = je.step(MODEL, state)
    assert events == ()
    assert_same(before, leaves(after))
    assert status_of(state, 1) == je.RequestStatus.QUEUED
    state, _ = finish(MODEL, je.close_request(state, 2))
    expected = [1] * 30 + continuation([1] * 30, 1) + [3] * 20
    assert tokens_of(state, 1) == expected + continuation(expected, CONTEXT - len(expected))


# C6: outcomes


def test_C6_an_idle_engine_has_no_work():
    state = je.init_state(MODEL, SMALL)
    assert je.plan_step(state).outcome == je.StepOutcome.NO_WORK
    state, _ = je.create_request(state)
    assert je.plan_step(state).outcome == je.StepOutcome.NO_WORK
    with pytest.raises(ValueError, match="NO_WORK has nothing to execute"):
        je.execute(MODEL, state, je.plan_step(state))


POOL = dataclasses.replace(SMALL, num_blocks=7)
"""28 slots, fewer than the context."""


@pytest.mark.parametrize("count", [28, 29])
def test_C6_a_prompt_that_no_empty_pool_holds_is_unserviceable_and_one_that_fits_is_not(count):
    state = begun(MODEL, [1] * count, config=POOL)
    plan = je.plan_step(state)
    expected = je.StepOutcome.COMMITTED if count == 28 else je.StepOutcome.UNSERVICEABLE_REQUEST
    assert plan.outcome == expected
    assert plan.unserviceable.tolist() == [1] * (count == 29)


def test_C6_an_unserviceable_request_fails_in_the_step_that_runs_the_others():
    state = begun(MODEL, [1] * 29, [2] * 3, limit=1, config=POOL)
    plan = je.plan_step(state)
    assert plan.outcome == je.StepOutcome.COMMITTED
    state, events = je.step(MODEL, state)
    assert {event.request_id: event.finish_reason.name for event in events} == {
        1: "FAILED",
        2: "MAX_GENERATED_TOKENS",
    }
    failed = next(event for event in events if event.request_id == 1)
    assert failed.error_code == je.EngineErrorCode.REQUEST_UNSERVICEABLE
    assert failed.flags == je.EngineEventFlags.TURN_FINISHED | je.EngineEventFlags.FAILED
    assert "num_blocks" in failed.detail
    assert status_of(state, 1) == je.RequestStatus.TURN_COMPLETE
    assert column(state, 1, "place") == -1


def test_C6_a_decode_that_outgrows_the_pool_fails_and_keeps_its_blocks_until_closed():
    state = begun(MODEL, [1] * 27, config=POOL)
    state, events = finish(MODEL, state)
    assert [event.finish_reason.name for event in events] == ["NONE", "NONE", "FAILED"]
    assert tokens_of(state, 1) == [1] * 27 + continuation([1] * 27, 2)
    assert len(state.control.free_blocks) == 0
    assert je.plan_step(submitted(state, [2])).outcome == je.StepOutcome.CAPACITY_DEFERRED
    state = je.close_request(state, 1)
    assert len(state.control.free_blocks) == 7


def test_C6_unserviceable_and_deferred_are_told_apart_beside_each_other():
    state = begun(MODEL, [1] * 29, [2] * 20, [3] * 20, [4] * 40, config=POOL)
    plan = je.plan_step(state)
    assert plan.unserviceable.tolist() == [1, 4]
    assert [row.request_id for row in plan.rows] == [2]
    assert plan.deferred == 1


def test_C6_C11_without_preemption_prompts_that_fill_the_pool_wait_until_something_is_closed():
    """C11's example, scaled down."""
    config = dataclasses.replace(POOL, preemption="none")
    state = begun(MODEL, *([n] * 8 for n in range(1, 4)), config=config)
    for _ in range(40):
        plan = je.plan_step(state)
        assert len(plan.unserviceable) == 0
        state = stepped(state)
    assert plan.outcome == je.StepOutcome.CAPACITY_DEFERRED
    state = je.close_request(state, 1)
    assert je.plan_step(state).outcome == je.StepOutcome.COMMITTED


# C7: layout


def test_C7_contributions_3_1_2_give_offsets_0_3_4_and_logits_rows_2_3_5():
    plan = je.plan_step(begun(MODEL, [1, 2, 3], [4], [5, 6]))
    assert [row.num_tokens for row in plan.rows] == [3, 1, 2]
    assert [row.packed_token_offset for row in plan.rows] == [0, 3, 4]
    assert [row.logits_row_index for row in plan.rows] == [2, 3, 5]
    assert plan.total_tokens == 6


@given(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(1, 64))
def test_C7_rows_lie_one_behind_the_other(prompts, budget):
    config = dataclasses.replace(LARGE, max_scheduled_tokens=budget)
    plan = je.plan_step(begun(MODEL, *([1] * count for count in prompts), config=config))
    end = 0
    for row in plan.rows:
        assert row.packed_token_offset == end
        end += row.num_tokens
        assert row.logits_row_index == end - 1
    assert plan.total_tokens == end
    blocks = [block for row in plan.rows for block in row.block_ids]
    assert len(blocks) == len(set(blocks))


@pytest.mark.parametrize("counts", [[4], [0], [-1]])
def test_C7_counts_that_do_not_fit_what_remains_are_refused_before_use(counts):
    state = begun(MODEL, [1, 2, 3])
    plan = dataclasses.replace(je.plan_step(state), num_tokens=np.array(counts))
    before = leaves(state)
    with pytest.raises(ValueError, match="plan does not fit"):
        je.execute(MODEL, state, plan)
    assert_same(before, leaves(state))


# C8: determinism


@given(
    prompts=st.lists(st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20), min_size=1, max_size=4),
    steps=st.integers(0, 5),
)
@settings(max_examples=30)
def test_C8_planning_twice_gives_the_same_plan_and_changes_nothing(prompts, steps):
    state = stepped(begun(MODEL, *prompts), steps)
    before = leaves(state)
    first, second = je.plan_step(state), je.plan_step(state)
    assert first.rows == second.rows
    assert first.outcome == second.outcome
    for field in dataclasses.fields(first):
        assert np.array_equal(getattr(first, field.name), getattr(second, field.name))
    assert_same(before, leaves(state))


def test_the_plain_planner_can_tell_a_wrong_order():
    """A test of the twin: it must not agree with whatever it is given."""
    twin = NaiveEngine(SMALL)
    for prompt in ([1] * 40, [2] * 3):
        twin.begin(twin.create(), prompt)
    plan = twin.plan()
    rows, deferred = plan.rows, plan.deferred
    assert [(row.request.id, row.count, row.new_blocks) for row in rows] == [(1, 15, 10), (2, 1, 1)]
    assert deferred == 0
