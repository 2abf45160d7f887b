"""The pool and the tables: each block belongs to exactly one owner (D1 to D5)."""

import dataclasses
import gc
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.blocks import blocks_for, release
from jaxengine.state import row_of
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, column, finish, leaves, tokens_of
from tests.jaxengine.scripts import MODEL as SCRIPTED
from tests.jaxengine.scripts import commands, steps

MODEL = toy_model()


def table(state, request_id):
    row = row_of(state.control, request_id)
    return state.control.blocks.read(row, 0, int(state.control.blocks_held[row])).tolist()


@given(slots=st.integers(0, 10**9), size=st.integers(1, 4096))
def test_D2_blocks_needed_is_the_ceiling(slots, size):
    assert blocks_for(slots, size) == slots // size + (slots % size > 0)
    assert blocks_for(np.array([slots, 0]), size).tolist() == [slots // size + (slots % size > 0), 0]


@given(data=st.data(), size=st.integers(1, 20))
@settings(max_examples=60)
def test_D1_D5_what_is_taken_and_given_back_makes_the_whole_pool_again(data, size):
    free = np.arange(size, dtype=np.int32)
    held: list[int] = []
    for _ in range(5):
        count = data.draw(st.integers(0, len(free)))
        older = free.copy()
        taken, free = free[len(free) - count :], free[: len(free) - count]
        held += taken.tolist()
        back = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
        free_now = release(free, np.array(back, np.int32), size)
        held = [block for block in held if block not in back]
        assert sorted([*free_now.tolist(), *held]) == list(range(size))
        assert free_now.dtype == np.int32
        assert np.array_equal(free, older[: len(free)])
        free = free_now


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([2], "block 2 is free already"),
        ([0, 2], "block 2 is free already"),
        ([0, 0], "block 0 is free already"),
        ([0, 4], "block 4 is outside the pool of 4"),
        ([-1], "block -1 is outside the pool of 4"),
        ([2**31 - 1], "outside the pool"),
    ],
)
def test_D5_freeing_a_free_foreign_or_repeated_block_raises_and_changes_nothing(blocks, words):
    free = np.array([2, 3], np.int32)
    with pytest.raises(ValueError, match=words):
        release(free, np.array(blocks, np.int64), 4)
    assert free.tolist() == [2, 3]


def test_D1_an_empty_pool_is_all_free_and_the_first_blocks_go_first():
    state = je.init_state(MODEL, SMALL)
    assert sorted(state.control.free_blocks.tolist()) == list(range(SMALL.num_blocks))
    state = begun(MODEL, [1] * 9, [2] * 3)
    state, _ = je.step(MODEL, state)
    assert (table(state, 1), table(state, 2)) == ([0, 1, 2], [3])


def test_D3_a_reservation_is_all_or_nothing_and_leaves_the_committed_state_alone():
    state = begun(MODEL, [1] * 40, [2] * 30)
    before = leaves(state)
    plan = je.plan_step(state)
    (row,) = plan.rows
    assert (row.request_id, len(row.block_ids), plan.deferred) == (1, 10, 1)
    assert_same(before, leaves(state))
    je.execute(MODEL, state, plan)
    assert_same(before, leaves(state))
    assert table(state, 1) == []


def test_D4_of_many_transactions_from_one_state_one_commits():
    state = begun(MODEL, [1, 2, 3], limit=2)
    plan = je.plan_step(state)
    first, second = (je.execute(MODEL, state, plan) for _ in range(2))
    after, events = je.commit(state, second)
    assert len(events) == 1
    for late in (first, second):
        with pytest.raises(je.StaleTransactionError):
            je.commit(after, late)
    with pytest.raises(je.SpentStateError):
        je.commit(state, first)
    after, _ = finish(MODEL, after)
    assert len(tokens_of(after, 1)) == 5


@given(chunk=st.integers(1, 16), prompt=st.integers(1, 60), steps=st.integers(1, 12))
@settings(max_examples=40)
def test_D2_C5_a_prefill_owns_blocks_for_all_its_input_and_a_decode_for_its_committed_slots(
    chunk, prompt, steps
):
    state = begun(MODEL, [5] * prompt, config=dataclasses.replace(SMALL, chunk_size=chunk))
    for _ in range(steps):
        state, _ = je.step(MODEL, state)
        processed = column(state, 1, "processed")
        assert len(table(state, 1)) == -(-max(processed, prompt) // SMALL.block_size)
        assert sorted([*table(state, 1), *state.control.free_blocks.tolist()]) == list(
            range(SMALL.num_blocks)
        )


def owners(state):
    """Who has each block: 0 is the pool."""
    requests = state.control.requests.id.tolist()
    named = [(block, 0) for block in state.control.free_blocks.tolist()]
    return sorted(
        named + [(block, request_id) for request_id in requests for block in table(state, request_id)]
    )


@given(script=commands)
@settings(max_examples=30)
def test_D1_D2_D3_every_block_has_one_owner_and_a_step_only_moves_what_it_reserved(script):
    """Reserved blocks exist in the plan alone: until the commit they are the pool's."""
    for state, plan, answer in steps(script):
        before = owners(state)
        assert [block for block, _ in before] == list(range(SMALL.num_blocks))
        free = {block for block, owner in before if owner == 0}
        reserved = [block for row in plan.rows for block in row.block_ids]
        assert len(set(reserved)) == len(reserved)
        assert set(reserved) <= free
        transaction = je.execute(SCRIPTED, state, plan)
        assert owners(state) == before
        new, _ = je.commit(state, transaction)
        expected = dict(before)
        expected.update({block: row.request_id for row in plan.rows for block in row.block_ids})
        given_back = {block for request_id in plan.evicted.tolist() for block in table(state, request_id)}
        expected.update(dict.fromkeys(given_back, 0))
        assert owners(new) == sorted(expected.items())
        for row in plan.rows:
            held = table(state, row.request_id)
            assert table(new, row.request_id) == held + list(row.block_ids)
        answer.append(new)


@given(script=commands, which=st.integers(0, 5))
@settings(max_examples=20)
def test_D1_D5_closing_frees_a_requests_own_blocks_and_nobody_elses(script, which):
    for state, plan, answer in steps(script):
        ids = state.control.requests.id.tolist()
        request_id = ids[which % len(ids)]
        closed = je.close_request(state, request_id)
        expected = [(block, 0 if owner == request_id else owner) for block, owner in owners(state)]
        assert owners(closed) == expected
        assert_same(leaves(closed), leaves(je.close_request(closed, request_id)))
        answer.append(je.commit(state, je.execute(SCRIPTED, state, plan))[0])


def test_D5_dropping_a_transaction_is_nothing_however_often():
    """There is nothing to undo, so no name of it matters but the one that is committed."""
    state = begun(MODEL, [1, 2, 3], limit=2)
    before = leaves(state)
    transaction = je.execute(MODEL, state, je.plan_step(state))
    staged = weakref.ref(transaction.staged.result.logits)
    again = transaction
    del transaction
    assert_same(before, leaves(state))
    del again
    gc.collect()
    assert staged() is None
    assert_same(before, leaves(state))
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 1) == [1, 2, 3, *continuation([1, 2, 3], 2)]
