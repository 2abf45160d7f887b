"""A step is a value: dropping it is the rollback, committing it happens once, and nothing readable is ever written."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine import blocks, toy
from jaxengine.programs import Programs
from jaxengine.state import row_of
from jaxengine.toy import NAN, ToyDecoder, continuation, with_params
from tests.jaxengine.harness import SMALL, assert_same, leaves
from tests.jaxengine.scripts import (
    GREEDY,
    MODEL,
    SAMPLED,
    begin,
    commands,
    readable,
    steps,
    with_own_store,
)


def finish(model: je.Model, state: je.EngineState, request_id: int) -> list[int]:
    """Runs until the request's turn is over and returns its sequence."""
    while True:
        row = row_of(state.control, request_id)
        if state.control.requests.status[row] == je.RequestStatus.TURN_COMPLETE:
            return state.control.tokens.read(row, 0, int(state.control.requests.length[row])).tolist()
        state, _ = je.step(model, state)


def started(*prompts: Sequence[int], most: int = 6) -> tuple[je.EngineState, list[int]]:
    """A state in which each prompt's request has had its first step."""
    state, ids = je.init_state(MODEL, SMALL), []
    for prompt in prompts:
        state, request_id = begin(state, prompt, most)
        ids.append(request_id)
    state, _ = je.step(MODEL, state)
    state, _ = je.drain(state, 100)
    return state, ids


# Dropping


@settings(max_examples=30)
@given(script=commands, drops=st.integers(1, 2))
def test_E1_E2_a_dropped_transaction_leaves_every_leaf_and_the_retry_is_the_same(script, drops):
    for state, plan, answer in steps(script):
        before = leaves(state)
        dropped = [je.execute(MODEL, state, plan) for _ in range(drops)]
        assert_same(before, leaves(state))
        again = je.plan_step(state)
        for field in dataclasses.fields(je.StepPlan):
            np.testing.assert_array_equal(getattr(again, field.name), getattr(plan, field.name))
        retry = je.execute(MODEL, state, again)
        for each in dropped:
            if each.staged is not None:
                assert np.array_equal(each.staged.settled.token, retry.staged.settled.token)
                for one, other in zip(
                    jax.tree.leaves(each.staged.result), jax.tree.leaves(retry.staged.result), strict=True
                ):
                    np.testing.assert_array_equal(one, other)
        del dropped, each
        answer.append(je.commit(state, retry)[0])


@settings(max_examples=8)
@given(script=commands)
def test_E2_a_run_with_dropped_steps_ends_as_a_run_without(script):
    ends = []
    for drops in (0, 2):
        state = je.init_state(MODEL, SMALL)
        for state, plan, answer in steps(script):
            for _ in range(drops):
                je.execute(MODEL, state, plan)
            answer.append(je.commit(state, je.execute(MODEL, state, plan))[0])
            state = answer[0]
        ends.append(leaves(state))
    assert_same(*ends)


# Failing


class Broken(Exception):
    """What the broken parts below raise."""


@dataclasses.dataclass(frozen=True, eq=False)
class RaisingDecoder:
    """The toy decoder, raising in its forward pass."""

    toy: ToyDecoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.toy, name)

    def apply(self, *arguments: Any) -> Any:
        self.toy.apply(*arguments)
        raise Broken


def test_E3_an_error_in_the_forward_pass_leaves_the_state_usable():
    """Also case C7: a step that raises halfway costs nothing, and the retry gives what it would have given."""
    state, (_, two) = started([3, 1], [4, 1, 5])
    decoder = RaisingDecoder(MODEL.decoder)
    broken = dataclasses.replace(MODEL, decoder=decoder, programs=Programs(decoder))
    before, plan = leaves(state), je.plan_step(state)
    for _ in range(2):
        with pytest.raises(je.ExecutionError, match="Broken") as failure:
            je.execute(broken, state, plan)
        assert isinstance(failure.value.__cause__, Broken)
        assert_same(before, leaves(state))
    assert finish(MODEL, je.commit(state, je.execute(MODEL, state, plan))[0], two) == [
        4, 1, 5, *continuation([4, 1, 5], 6)
    ]  # fmt: skip


def test_E3_F7_non_finite_logits_drop_the_step_and_name_the_requests():
    state, (one, two) = started([3, 1], [4, 1, 5])
    before, plan = leaves(state), je.plan_step(state)
    with pytest.raises(je.RetryableStepError, match=f"request {one}, {two}") as failure:
        je.execute(with_params(MODEL, poison=True), state, plan)
    assert failure.value.request_ids == (one, two)
    assert_same(before, leaves(state))
    state, three = begin(state, [9, NAN])
    with pytest.raises(je.RetryableStepError, match=f"request {three} ") as failure:
        je.step(MODEL, state)
    assert failure.value.request_ids == (three,)
    state = je.close_request(state, three)
    assert finish(MODEL, state, one) == [3, 1, *continuation([3, 1], 6)]


def test_E3_an_error_before_the_write_leaves_state_and_transaction_usable():
    """The control value is built first: a transaction whose bookkeeping fails has donated nothing."""
    state, (one,) = started([3, 1])
    transaction = je.execute(MODEL, state, je.plan_step(state))
    assert transaction.staged is not None
    settled = dataclasses.replace(transaction.staged.settled, row=np.array([3]))
    wrong = dataclasses.replace(transaction, staged=dataclasses.replace(transaction.staged, settled=settled))
    before = leaves(state)
    with pytest.raises(je.ExecutionError, match="IndexError"):
        je.commit(state, wrong)
    assert_same(before, leaves(state))
    assert finish(MODEL, je.commit(state, transaction)[0], one) == [3, 1, *continuation([3, 1], 6)]


def test_E3_a_failure_of_the_write_itself_ends_the_state():
    """Nobody can tell what a failed donation left, so the state refuses work instead of reading it."""
    state, _ = started([3, 1])

    def publish(*arguments: Any, **static: Any) -> Any:
        raise Broken

    transaction = je.execute(MODEL, state, je.plan_step(state))
    assert transaction.staged is not None
    programs = Programs(MODEL.decoder)
    programs.publish = publish
    staged = dataclasses.replace(transaction.staged, programs=programs)
    with pytest.raises(je.StoreLostError):
        je.commit(state, dataclasses.replace(transaction, staged=staged))
    with pytest.raises(je.SpentStateError):
        je.plan_step(state)


# Writing


@settings(max_examples=30)
@given(script=commands, donate=st.booleans())
def test_E8_every_readable_slot_is_the_same_after_the_step(script, donate):
    for state, plan, answer in steps(script):
        before = readable(state, state)
        transaction = je.execute(MODEL, state, plan)
        for one, other in zip(before, readable(state, state), strict=True):
            np.testing.assert_array_equal(one, other)
        old = state
        new, _ = je.commit(state, transaction, donate=donate)
        for one, other in zip(before, readable(new, old), strict=True):
            np.testing.assert_array_equal(one, other)
        if not donate:
            for one, other in zip(before, readable(old, old), strict=True):
                np.testing.assert_array_equal(one, other)
        answer.append(new)


@settings(max_examples=30)
@given(script=commands)
def test_E4_the_cache_always_holds_exactly_the_committed_tokens(script):
    """One boundary: each committed slot holds the key and value of the token that the sequence has there."""
    for state, plan, answer in steps(script):
        new, _ = je.commit(state, je.execute(MODEL, state, plan))
        requests = new.control.requests
        slots = [values for values in readable(new, new) if values.ndim == 4]
        for row, kv in enumerate(slots):
            tokens = new.control.tokens.read(row, 0, int(requests.processed[row]))
            position = np.arange(len(tokens))
            weights = list(map(toy.weight, tokens, position))
            np.testing.assert_allclose(kv[:, 0, 0, 0], np.log(weights), rtol=1e-6)
            for channel in range(toy.CHANNELS):
                numbers = [toy.number(t, p, channel) for p, t in enumerate(tokens)]
                np.testing.assert_array_equal(kv[:, 1, 0, channel], np.array(numbers) - 1)
            np.testing.assert_array_equal(kv[:, 1, 0, toy.CHANNELS], position == 0)
        tables = [values for values in readable(new, new) if values.ndim == 1]
        residents = np.flatnonzero(requests.place >= 0)
        for row, table in zip(residents, tables, strict=True):
            assert table.tolist() == new.control.blocks.read(int(row), 0, len(table)).tolist()
        answer.append(new)


# Committing


@settings(max_examples=8)
@given(script=commands, count=st.integers(2, 3), data=st.data())
def test_D4_of_several_transactions_from_one_state_exactly_one_commits(script, count, data):
    for state, plan, answer in steps(script):
        transactions = [je.execute(MODEL, state, plan) for _ in range(count)]
        first = data.draw(st.integers(0, count - 1))
        donate = data.draw(st.booleans())
        new, _ = je.commit(state, transactions[first], donate=donate)
        before = leaves(new)
        for transaction in transactions:
            with pytest.raises(je.StaleTransactionError):
                je.commit(new, transaction)
        assert_same(before, leaves(new))
        answer.append(new)


def test_D4_a_transaction_without_rows_commits_once_too():
    """Its only work is to end a turn that no pool can serve; a second one from the same state would end it twice."""
    state, request_id = begin(je.init_state(MODEL, dataclasses.replace(SMALL, num_blocks=2)), [1] * 12)
    plan = je.plan_step(state)
    assert plan.outcome is je.StepOutcome.UNSERVICEABLE_REQUEST
    first, second = je.execute(MODEL, state, plan), je.execute(MODEL, state, plan)
    state, events = je.commit(state, first)
    assert [event.request_id for event in events] == [request_id]
    with pytest.raises(je.StaleTransactionError):
        je.commit(state, second)
    assert len(state.control.events) == 1


@pytest.mark.parametrize("donate", [True, False])
def test_D4_a_commit_without_rows_spends_or_keeps_the_state_like_any_other(donate):
    """Two of one state would both end the turn; and the state that is kept must outlive the other's next commit."""
    before, _ = begin(je.init_state(MODEL, dataclasses.replace(SMALL, num_blocks=2)), [1] * 12)
    plan = je.plan_step(before)
    first, second = je.execute(MODEL, before, plan), je.execute(MODEL, before, plan)
    after, _ = je.commit(before, first, donate=donate)
    after, _ = begin(after, [3, 1])
    after, _ = je.step(MODEL, after)
    if donate:
        with pytest.raises(je.SpentStateError):
            je.commit(before, second)
    else:
        _, events = je.commit(before, second)
        assert [event.finish_reason for event in events] == [je.FinishReason.FAILED]
    je.check_invariants(after)


def test_D4_a_transaction_is_committed_once_on_any_state():
    state, _ = started([3, 1])
    transaction = je.execute(MODEL, state, je.plan_step(state))
    new, _ = je.commit(state, transaction, donate=False)
    for target in (state, new):
        with pytest.raises(je.StaleTransactionError, match="already"):
            je.commit(target, transaction)
    je.commit(state, je.execute(MODEL, state, je.plan_step(state)))


def close_it(state, one, two):
    return je.close_request(state, one)


def cancel_it(state, one, two):
    return je.cancel_turn(state, one, 1)[0]


def cancel_and_begin_again(state, one, two):
    state, _ = je.drain(je.cancel_turn(state, one, 1)[0], 10)
    return je.begin_turn(state, one, [2, 2])[0]


def free_blocks_of_another(state, one, two):
    return je.close_request(state, two)


def step_elsewhere(state, one, two):
    return je.step(MODEL, state)[0]


@pytest.mark.parametrize(
    "change", [close_it, cancel_it, cancel_and_begin_again, free_blocks_of_another, step_elsewhere]
)
def test_D4_a_transaction_is_refused_before_donation_when_what_it_read_has_changed(change):
    state, (one, two, three) = started([3, 1], [4, 1, 5], [6])
    state = je.cancel_turn(state, two, 1)[0]
    stale = je.execute(MODEL, state, je.plan_step(state))
    state = change(state, one, two)
    before = leaves(state)
    with pytest.raises(je.StaleTransactionError, match="execute again"):
        je.commit(state, stale)
    assert_same(before, leaves(state))
    je.check_invariants(state)
    assert finish(MODEL, state, three) == [6, *continuation([6], 6)]


def test_D4_a_transaction_is_refused_when_its_only_request_is_gone():
    state, (one,) = started([3, 1])
    plan = je.plan_step(state)
    transaction = je.execute(MODEL, state, plan)
    state = je.close_request(state, one)
    with pytest.raises(je.StaleTransactionError):
        je.commit(state, transaction)
    with pytest.raises(ValueError, match="plan"):
        je.execute(MODEL, state, plan)
    je.check_invariants(state)


def test_D4_unrelated_changes_do_not_invalidate_a_transaction():
    """New requests, turns of others, drained events and the closing of one that holds nothing; each change survives."""
    state, (one,) = started([3, 1])
    state, idle = je.create_request(state)
    state, other = je.create_request(state, je.RequestOptions(sampling=GREEDY))
    transaction = je.execute(MODEL, state, je.plan_step(state))
    state = je.close_request(state, idle)
    state, _ = je.begin_turn(state, other, [7, 7], je.TurnOptions(max_generated_tokens=4))
    state, late = begin(state, [8], most=4)
    state, _ = je.drain(state, 10)
    new, events = je.commit(state, transaction)
    je.check_invariants(new)
    assert [event.request_id for event in events] == [one]
    assert finish(MODEL, with_own_store(new), late) == [8, *continuation([8], 4)]
    assert finish(MODEL, with_own_store(new), other) == [7, 7, *continuation([7, 7], 4)]
    assert finish(MODEL, new, one) == [3, 1, *continuation([3, 1], 6)]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (je.RequestOptions(sampling=GREEDY), [3, 2]),
        (je.RequestOptions(sampling=SAMPLED), [3, 1]),
        (je.RequestOptions(sampling=dataclasses.replace(SAMPLED, seed=8)), [3, 1]),
    ],
    ids=["tokens", "sampling", "seed"],
)
def test_D4_branches_of_one_state_are_told_apart(options, tokens):
    """Requests of two branches have the same id; a step of one says nothing about the other."""
    root = je.init_state(MODEL, SMALL)
    base = GREEDY if options.sampling == GREEDY or options.sampling.seed == 7 else SAMPLED
    left, request_id = begin(root, [3, 1], sampling=base)
    right, same_id = je.create_request(root, options)
    right, _ = je.begin_turn(right, same_id, tokens, je.TurnOptions(max_generated_tokens=6))
    assert same_id == request_id
    transaction = je.execute(MODEL, left, je.plan_step(left))
    before = leaves(right)
    with pytest.raises(je.StaleTransactionError):
        je.commit(right, transaction)
    assert_same(before, leaves(right))
    je.commit(left, transaction)


def test_D4_without_donation_both_futures_are_independent():
    state, (one, _) = started([3, 1], [4, 1, 5], most=20)
    kept = leaves(state)
    future, _ = je.commit(state, je.execute(MODEL, state, je.plan_step(state)), donate=False)
    assert_same(kept, leaves(state))
    branch = je.close_request(state, one)
    branch, three = begin(branch, [9, 9, 9, 9, 9], most=20)
    frozen = leaves(future)
    for _ in range(6):
        branch, _ = je.step(MODEL, branch)
    assert_same(frozen, leaves(future))
    assert finish(MODEL, future, one) == [3, 1, *continuation([3, 1], 20)]
    assert finish(MODEL, branch, three) == [9] * 5 + continuation([9] * 5, 20)


# Ownership


pools = st.integers(1, 30).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sets(st.integers(0, size - 1)), st.randoms(use_true_random=False)
    )
)


@given(pool=pools)
def test_D5_blocks_go_back_once_and_only_where_they_came_from(pool):
    size, free, random = pool
    free_ids = np.array(sorted(free), np.int32)
    held = [block for block in range(size) if block not in free]
    random.shuffle(held)
    before = free_ids.copy()
    back = blocks.release(free_ids, np.array(held, np.int32), size)
    assert sorted(back.tolist()) == list(range(size))
    for wrong in (-1, size, *sorted(free)[:2]):
        with pytest.raises(ValueError, match=f"block {wrong} "):
            blocks.release(free_ids, np.array([*held, wrong], np.int32), size)
    if held:
        with pytest.raises(ValueError, match=f"block {held[0]} "):
            blocks.release(free_ids, np.array([*held, held[0]], np.int32), size)
    np.testing.assert_array_equal(free_ids, before)


def test_D5_dropping_a_transaction_takes_and_returns_no_blocks():
    state, _ = started([3, 1], [4])
    free = len(state.control.free_blocks)
    transaction = je.execute(MODEL, state, je.plan_step(state))
    again = transaction
    del transaction, again
    assert len(state.control.free_blocks) == free
    je.check_invariants(state)


def pointers(state: je.EngineState) -> list[int]:
    """Addresses of the store's buffers."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.store)]


def four_layers() -> je.Model:
    """The toy decoder with its cache in four equal layers, so that buffers could be shared."""

    @dataclasses.dataclass(frozen=True, eq=False)
    class Layered(ToyDecoder):
        def apply(self, params, tokens, positions, attention, logits_rows, fixed, limits):
            results = [
                ToyDecoder((spec,), (), self.vocab_size, params, "").apply(
                    params, tokens, positions, attention, logits_rows
                )
                for spec in self.layers
            ]
            return results[-1][0], tuple(staged for _, (staged,) in results)

    (spec,) = MODEL.decoder.layers
    layers = tuple(dataclasses.replace(spec, layer=layer) for layer in range(4))
    decoder = Layered(layers, (), MODEL.decoder.vocab_size, MODEL.decoder.params, "four layers")
    return dataclasses.replace(MODEL, decoder=decoder, programs=Programs(decoder))


def test_case_C7_no_two_leaves_share_a_buffer_and_a_donated_commit_stays_in_place():
    model = four_layers()
    state = je.init_state(model, SMALL)
    assert len(set(pointers(state))) == len(pointers(state)) == 5
    state, request_id = begin(state, [3, 1])
    state, _ = je.step(model, state)
    assert len(set(pointers(state))) == 5
    home = pointers(state)
    for _ in range(2):
        state, _ = je.step(model, state)
        assert pointers(state) == home
    copied, _ = je.commit(state, je.execute(model, state, je.plan_step(state)), donate=False)
    assert len({*pointers(state), *pointers(copied)}) == 10
    assert finish(model, copied, request_id) == [3, 1, *continuation([3, 1], 6)]


def test_case_C7_cache_memory_does_not_double():
    model = four_layers()
    config = dataclasses.replace(SMALL, num_blocks=37)
    state, _ = begin(je.init_state(model, config), [3, 1], most=30)
    shape = state.store.pages[0].shape

    def pool_arrays() -> int:
        gc.collect()
        return sum(array.shape == shape and not array.is_deleted() for array in jax.live_arrays())

    assert pool_arrays() == 4
    for _ in range(3):
        transaction = je.execute(model, state, je.plan_step(state))
        assert pool_arrays() == 4
        old = state
        state, _ = je.commit(state, transaction)
        assert pool_arrays() == 4
        assert old.store.lease.spent
    kept, _ = je.commit(state, je.execute(model, state, je.plan_step(state)), donate=False)
    assert pool_arrays() == 8
    del kept
    assert pool_arrays() == 4


def test_case_C7_stepping_twice_from_one_state():
    state, (one,) = started([3, 1])
    first, _ = je.commit(state, je.execute(MODEL, state, je.plan_step(state)), donate=False)
    second, _ = je.step(MODEL, state)
    assert_same(leaves(first), leaves(second))
    with pytest.raises(je.SpentStateError):
        je.step(MODEL, state)
    assert finish(MODEL, second, one) == finish(MODEL, first, one)


# Refusing


def test_a_spent_state_refuses_every_call_and_names_the_remedy():
    state, (one,) = started([3, 1])
    plan = je.plan_step(state)
    transaction, other = je.execute(MODEL, state, plan), je.execute(MODEL, state, plan)
    je.commit(state, transaction)
    for use in (
        lambda: je.plan_step(state),
        lambda: je.execute(MODEL, state, plan),
        lambda: je.commit(state, other),
        lambda: je.step(MODEL, state),
        lambda: je.create_request(state),
        lambda: je.begin_turn(state, one, [1]),
        lambda: je.cancel_turn(state, one, 1),
        lambda: je.close_request(state, one),
        lambda: je.drain(state, 1),
        lambda: je.check_invariants(state),
    ):
        with pytest.raises(je.SpentStateError, match="donate=False"):
            use()


def test_D3_a_plan_runs_only_on_the_state_that_it_was_made_from():
    """A foreign plan is refused before anything is reserved by it: its blocks may have other owners by now."""
    state, _ = started([3, 1], [4, 1, 5])
    old = je.plan_step(state)
    state, _ = je.step(MODEL, state)
    before = leaves(state)
    with pytest.raises(ValueError, match="plan"):
        je.execute(MODEL, state, old)
    empty = je.plan_step(je.init_state(MODEL, SMALL))
    with pytest.raises(ValueError, match="NO_WORK"):
        je.execute(MODEL, state, empty)
    assert_same(before, leaves(state))


def test_D3_a_plan_does_not_revive_a_cancelled_turn():
    state, (one,) = started([3, 1])
    plan = je.plan_step(state)
    state, cancelled = je.cancel_turn(state, one, 1)
    assert cancelled
    with pytest.raises(ValueError, match="plan"):
        je.execute(MODEL, state, plan)


def test_D3_a_plan_does_not_hand_out_blocks_that_found_an_owner():
    state, one = begin(je.init_state(MODEL, SMALL), [3, 1, 4, 1, 5])
    plan = je.plan_step(state)
    state, _ = je.drain(je.cancel_turn(state, one, 1)[0], 10)
    state, _ = begin(state, [2, 7, 1, 8, 2])
    state, _ = je.step(MODEL, state)
    with pytest.raises((ValueError, je.StaleTransactionError)):
        je.commit(state, je.execute(MODEL, state, plan))
    je.check_invariants(state)


def test_a_state_is_executed_by_its_own_model_only():
    state, _ = started([3, 1])
    other = dataclasses.replace(MODEL, decoder=dataclasses.replace(MODEL.decoder, identity="another"))
    with pytest.raises(ValueError, match="another model"):
        je.execute(other, state, je.plan_step(state))
