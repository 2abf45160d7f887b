"""A plan belongs to the state that it was made from: offered to a later one it is refused unless nothing that it rests
on has changed (C7, D3, D4)."""

import pytest

import jaxengine as je
from jaxengine.toy import continuation, next_token, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, finish, leaves, tokens_of

MODEL = toy_model()


def assert_refused(state, plan):
    before = leaves(state)
    with pytest.raises(ValueError, match="plan does not fit this state"):
        je.execute(MODEL, state, plan)
    assert_same(before, leaves(state))
    state, _ = finish(MODEL, state)
    return state


def two_requests():
    state, _ = je.create_request(je.init_state(MODEL, SMALL))
    state, _ = je.create_request(state)
    return state


def test_C7_D3_a_plan_from_before_the_pool_changed_is_refused():
    """Its blocks may have other owners by now, and the pool's next blocks are not the ones that it names."""
    state, _ = je.begin_turn(two_requests(), 2, [1] * 6, je.TurnOptions(1))
    state, _ = finish(MODEL, state)
    state, _ = je.begin_turn(state, 1, [2] * 6, je.TurnOptions(3))
    plan = je.plan_step(state)
    state = assert_refused(je.close_request(state, 2), plan)
    assert tokens_of(state, 1) == [2] * 6 + continuation([2] * 6, 3)


def test_C7_D3_a_plan_whose_place_was_taken_is_refused():
    state, _ = je.begin_turn(two_requests(), 1, [2] * 6, je.TurnOptions(3))
    plan = je.plan_step(state)
    state, _ = je.begin_turn(state, 2, [1] * 6, je.TurnOptions(1))
    state, _ = je.cancel_turn(state, 1, 1)
    state, _ = je.drain(state, 1)
    state, _ = je.step(MODEL, state)
    state, _ = je.drain(state, 1)
    state, _ = je.begin_turn(state, 1, [3], je.TurnOptions(3))
    state = assert_refused(state, plan)
    assert tokens_of(state, 2) == [1] * 6 + continuation([1] * 6, 1)


def test_C7_a_plan_for_a_turn_that_was_cancelled_is_refused():
    state = begun(MODEL, [1] * 6)
    plan = je.plan_step(state)
    state, _ = je.cancel_turn(state, 1, 1)
    assert_refused(state, plan)


def test_C7_a_plan_from_before_more_input_came_is_refused():
    """Its last token sampled then and would not now."""
    state = begun(MODEL, [1] * 3, limit=1)
    plan = je.plan_step(state)
    state, _ = je.cancel_turn(state, 1, 1)
    state, _ = je.drain(state, 1)
    state, _ = je.begin_turn(state, 1, [2], je.TurnOptions(1))
    state = assert_refused(state, plan)
    assert tokens_of(state, 1) == [1, 1, 1, 2, next_token([1, 1, 1, 2])]


def test_D4_a_plan_survives_what_it_does_not_rest_on():
    state = begun(MODEL, [1] * 3, limit=1)
    plan = je.plan_step(state)
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, [7], je.TurnOptions(1))
    state, _ = je.commit(state, je.execute(MODEL, state, plan))
    je.check_invariants(state)
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 1) == [1, 1, 1, next_token([1, 1, 1])]
    assert tokens_of(state, request_id) == [7, next_token([7])]
