"""The pool and the tables: each block belongs to exactly one owner (D1 to D5)."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.blocks import blocks_for, release
from jaxengine.state import row_of
from jaxengine.toy import toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, column, finish, leaves, tokens_of

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
