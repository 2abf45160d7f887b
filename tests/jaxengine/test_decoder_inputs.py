"""What a packed graph is fed: each input against a plain loop, and bounds that hold for all that replays a bucket."""

import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.decoder_inputs import (
    DecoderInputs,
    attention_metadata,
    bucket_metadata,
    decoder_inputs,
    logits_rows,
    table_bucket,
)
from jaxengine.state import row_of
from jaxengine.toy import CONTEXT
from tests.jaxengine.harness import SMALL, assert_same, begun, leaves, tokens_of
from tests.jaxengine.scripts import MODEL, commands, steps

EXPORTS = Path(__file__).parents[1] / "fixtures" / "models" / "paged-fp16"
DTYPES = dict.fromkeys(DecoderInputs._fields, np.int32) | dict.fromkeys(
    ("input_ids", "position_ids"), np.int64
)
INT32_MAX = 2**31 - 1


def stepped(state, steps=1):
    for _ in range(steps):
        state, _ = je.step(MODEL, state)
    return state


# G1: rows one behind the other


def packed_by_loop(state, plan):
    """Lists of what the graph is to get; a table is what its row holds and what the plan reserves."""
    tokens, positions, boundaries, past, tables = [], [], [0], [], []
    for row in plan.rows:
        index = row_of(state.control, row.request_id)
        start = int(state.control.requests.processed[index])
        for position in range(start, start + row.num_tokens):
            tokens.append(tokens_of(state, row.request_id)[position])
            positions.append(position)
        boundaries.append(len(tokens))
        past.append(start)
        held = state.control.blocks.read(index, 0, int(state.control.blocks_held[index]))
        tables.append([*held.tolist(), *row.block_ids])
    width = max(map(len, tables))
    return tokens, positions, boundaries, past, [table + [-1] * (width - len(table)) for table in tables]


@settings(max_examples=30)
@given(script=commands)
def test_G1_G2_G3_inputs_equal_a_plain_loop_in_every_step(script):
    for state, plan, answer in steps(script):
        if plan.rows:
            before = leaves(state)
            inputs = decoder_inputs(state, plan)
            assert_same(before, leaves(state))
            assert {name: array.dtype for name, array in inputs._asdict().items()} == DTYPES
            tokens, positions, boundaries, past, table = packed_by_loop(state, plan)
            longest = max(start + row.num_tokens for start, row in zip(past, plan.rows, strict=True))
            metadata = [max(row.num_tokens for row in plan.rows), longest, longest]
            found = [array.tolist() for array in inputs]
            assert found == [tokens, positions, boundaries, past, table, metadata]
            rows = logits_rows(inputs.cumulative_sequence_lengths)
            assert rows.tolist() == [row.logits_row_index for row in plan.rows]
        answer.append(je.step(MODEL, state)[0])


@settings(max_examples=30)
@given(script=commands)
def test_G1_D3_no_position_of_a_row_reads_a_hole_and_the_commit_keeps_the_proposed_table(script):
    for state, plan, answer in steps(script):
        table = decoder_inputs(state, plan).block_table if plan.rows else []
        after = je.step(MODEL, state)[0]
        for row, past, blocks in zip(plan.rows, plan.past.tolist(), table, strict=True):
            read = [int(blocks[position // SMALL.block_size]) for position in range(past + row.num_tokens)]
            assert min(read) >= 0
            index = row_of(after.control, row.request_id)
            held = int(after.control.blocks_held[index])
            assert blocks[:held].tolist() == after.control.blocks.read(index, 0, held).tolist()
            assert (blocks[held:] == -1).all()
        answer.append(after)


@given(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8), tokens=st.integers(1, 64))
def test_G1_mrope_repeats_the_text_positions_on_three_axes_and_changes_nothing_else(prompts, tokens):
    config = je.EngineConfig(8, tokens, num_blocks=64, block_size=4)
    state = begun(MODEL, *([1] * count for count in prompts), config=config)
    plan = je.plan_step(state)
    text, mrope = decoder_inputs(state, plan), decoder_inputs(state, plan, mrope=True)
    assert (mrope.position_ids.shape, mrope.position_ids.dtype) == ((3, plan.total_tokens), np.int64)
    assert (mrope.position_ids == text.position_ids).all()
    for name in set(DecoderInputs._fields) - {"position_ids"}:
        assert np.array_equal(getattr(mrope, name), getattr(text, name))


def test_G1_decodes_and_a_cut_prefill_share_a_step():
    config = dataclasses.replace(SMALL, max_scheduled_tokens=6)
    state = stepped(begun(MODEL, [1, 2, 3], [4], limit=5, config=config))
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, [5, 6, 7, 8, 9])
    inputs = decoder_inputs(state, je.plan_step(state))
    chosen = [tokens_of(state, 1)[3], tokens_of(state, 2)[1]]
    assert inputs.input_ids.tolist() == [*chosen, 5, 6, 7, 8]
    assert inputs.position_ids.tolist() == [3, 1, 0, 1, 2, 3]
    assert inputs.cumulative_sequence_lengths.tolist() == [0, 1, 2, 6]
    assert inputs.past_sequence_lengths.tolist() == [3, 1, 0]
    # The third row's whole input is reserved for, though four of its five tokens run.
    assert (inputs.block_table >= 0).tolist() == [[True, False], [True, False], [True, True]]
    assert inputs.attention_metadata.tolist() == [4, 4, 4]


def test_G1_rows_are_found_again_after_an_unrelated_request_has_gone():
    state, unrelated = je.create_request(begun(MODEL))
    for prompt in ([1, 2], [3]):
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt)
    plan = je.plan_step(state)
    before = decoder_inputs(state, plan)
    after = decoder_inputs(je.close_request(state, unrelated), plan)
    assert before.input_ids.tolist() == [1, 2, 3]
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_G1_fields_are_named_typed_and_shaped_as_the_exports_declare(family):
    graph = onnx.load(EXPORTS / family / "model.onnx", load_external_data=False).graph
    state = begun(MODEL, [1, 2, 3], [4])
    inputs = decoder_inputs(state, je.plan_step(state))._asdict()
    declared = {value.name: value.type.tensor_type for value in graph.input if "key_values" not in value.name}
    assert set(declared) == set(inputs) - {"position_ids"}
    for name, tensor in declared.items():
        assert inputs[name].dtype == onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        assert inputs[name].ndim == len(tensor.shape.dim)


def unserviceable():
    state = begun(MODEL, [1] * 9, config=je.EngineConfig(num_blocks=2, block_size=4))
    return state, je.plan_step(state)


def stale():
    state = begun(MODEL, [1, 2])
    plan = je.plan_step(state)
    return je.close_request(state, 1), plan


def too_many():
    state = begun(MODEL, [1, 2])
    return state, dataclasses.replace(je.plan_step(state), num_tokens=np.array([3]))


def idle():
    state = begun(MODEL)
    return state, je.plan_step(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unserviceable, "no rows to feed; execute and commit it"),
        (stale, "request 1 changed since; plan and execute from the same state"),
        (too_many, "a row has too many tokens or none; plan again"),
        (idle, "NO_WORK has nothing to execute"),
    ],
)
def test_G1_a_plan_that_could_not_be_executed_is_not_laid_out(make, words):
    state, plan = make()
    with pytest.raises(ValueError, match=words):
        decoder_inputs(state, plan)


def test_G1_a_spent_state_is_refused():
    state = begun(MODEL, [1, 2])
    plan = je.plan_step(state)
    stepped(state)
    with pytest.raises(je.SpentStateError, match="spent by a commit"):
        decoder_inputs(state, plan)


# G2: exact bounds


@given(rows=st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 2**30 - 1)), min_size=1, max_size=9))
def test_G2_the_exact_bounds_are_the_lengths_themselves(rows):
    query = longest = 0
    for past, count in rows:
        query, longest = max(query, count), max(longest, past + count)
    metadata = attention_metadata(*np.array(rows).T)
    assert metadata.dtype == np.int32
    assert metadata.tolist() == [query, longest, longest]


def test_G2_the_longest_query_and_the_longest_kv_length_may_be_of_different_rows():
    assert attention_metadata(np.array([0, 40]), np.array([7, 1])).tolist() == [7, 41, 41]


def test_G2_the_largest_length_of_int32_is_still_a_bound():
    assert attention_metadata(np.array([INT32_MAX - 1]), np.array([1])).tolist() == [1, INT32_MAX, INT32_MAX]


INTS = np.array([1, 2])


@pytest.mark.parametrize(
    ("past", "num_tokens", "words"),
    [
        (INTS[:0], INTS[:0], "num_tokens is empty; give at least one row"),
        (INTS, np.array([1, 0]), r"num_tokens\[1\] is 0; give a value from 1"),
        (np.array([-1, 0]), INTS, r"past\[0\] is -1; give a value from 0"),
        (np.array([0, 2**31]), INTS, r"past\[1\] is 2147483648; give a value from 0 to 2147483647"),
        (np.array([2**64 - 1, 0], np.uint64), INTS, r"past\[0\] is 18446744073709551615"),
        (
            np.array([INT32_MAX, 0]),
            INTS,
            "longest KV length is 2147483648 and does not fit int32; shorten the longest row",
        ),
        (INTS[:1], INTS, r"past is int64\[1\]; give one integer a row"),
        (INTS, np.ones((2, 1), np.int64), r"num_tokens is int64\[2, 1\]"),
        (np.ones(2), INTS, r"past is float64\[2\]"),
        (INTS, np.ones(2, bool), r"num_tokens is bool\[2\]"),
    ],
)
def test_G2_exact_bounds_that_are_none_are_refused(past, num_tokens, words):
    with pytest.raises(ValueError, match=words):
        attention_metadata(past, num_tokens)


# G2: buckets


def buckets_by_loop(capacity):
    """Every bucket of a capacity, ascending."""
    found, width = [], 8
    while width < capacity:
        found.append(width)
        width *= 2
    return [*found, capacity]


def bounds_by_enumeration(columns, block_size, capacity):
    """The shortest and longest KV length whose exact table falls into the same bucket as one of `columns`."""
    bucket = min(width for width in buckets_by_loop(capacity) if width >= columns)
    lengths = []
    for length in range(1, capacity * block_size + 1):
        needed = (length + block_size - 1) // block_size
        if min(width for width in buckets_by_loop(capacity) if width >= needed) == bucket:
            lengths.append(length)
    return min(lengths), max(lengths)


@st.composite
def bucketed_steps(draw, *, exact):
    """A capacity, a block size and two decode steps, (past, table lengths) each, in the same bucket of table widths."""
    capacity, block_size = draw(st.integers(1, 70)), draw(st.integers(1, 20))
    buckets = buckets_by_loop(capacity)
    nth = draw(st.integers(0, len(buckets) - 1))
    fewest = buckets[nth - 1] + 1 if nth else 1

    def step():
        longest = draw(st.integers(fewest, buckets[nth]))
        lengths = [longest, *draw(st.lists(st.integers(1, longest), max_size=5))]
        past = [
            draw(st.integers((columns - 1) * block_size if exact else 0, columns * block_size - 1))
            for columns in lengths
        ]
        order = draw(st.permutations(range(len(lengths))))
        return np.array([past[i] for i in order]), np.array([lengths[i] for i in order])

    return capacity, block_size, step(), step()


@given(columns=st.integers(1, 600), more=st.integers(0, 600))
def test_G2_N1_a_bucket_is_the_narrowest_that_holds_the_table(columns, more):
    capacity = columns + more
    expected = min(width for width in buckets_by_loop(capacity) if width >= columns)
    assert table_bucket(columns, capacity) == expected


@pytest.mark.parametrize(
    ("capacity", "buckets"),
    [(1, {1}), (5, {5}), (8, {8}), (9, {8, 9}), (20, {8, 16, 20}), (32, {8, 16, 32}), (33, {8, 16, 32, 33})],
)
def test_G2_N1_buckets_are_powers_of_two_from_8_up_cut_to_the_capacity(capacity, buckets):
    assert {table_bucket(columns, capacity) for columns in range(1, capacity + 1)} == buckets


@settings(max_examples=300)
@given(case=bucketed_steps(exact=True))
def test_G2_the_bounds_of_one_step_hold_for_every_step_of_its_bucket_and_are_the_tightest(case):
    capacity, block_size, captured, replayed = case
    metadata = bucket_metadata(*captured, block_size=block_size, capacity=capacity)
    assert metadata.dtype == np.int32
    query, upper, lower = metadata.tolist()
    longest = int(replayed[0].max()) + 1
    assert (query, lower <= longest <= upper) == (1, True)
    assert (lower, upper) == bounds_by_enumeration(int(captured[1].max()), block_size, capacity)
    assert metadata.tolist() == bucket_metadata(*replayed, block_size=block_size, capacity=capacity).tolist()


@settings(max_examples=300)
@given(case=bucketed_steps(exact=False))
def test_G2_where_tables_may_be_longer_than_needed_the_lower_bound_is_1(case):
    capacity, block_size, captured, replayed = case
    query, upper, lower = bucket_metadata(
        *captured, block_size=block_size, capacity=capacity, exact_tables=False
    )
    longest = int(replayed[0].max()) + 1
    assert (query, lower, longest <= upper) == (1, 1, True)
    assert upper == block_size * min(w for w in buckets_by_loop(capacity) if w >= captured[1].max())


@settings(max_examples=20)
@given(prompts=st.lists(st.integers(1, 45), min_size=1, max_size=3))
def test_G2_every_decode_of_the_engine_lies_within_its_bucket(prompts):
    """C5: a decode row's table is exact, so the engine's steps never need `exact_tables=False`."""
    config = dataclasses.replace(SMALL, num_blocks=64)
    state, capacity, decodes = begun(MODEL, *([1] * n for n in prompts), config=config), CONTEXT // 4, 0
    for _ in range(24):
        plan = je.plan_step(state)
        if plan.rows and not plan.is_prefill.any():
            inputs = decoder_inputs(state, plan)
            exact = inputs.attention_metadata.tolist()
            lengths = (inputs.block_table >= 0).sum(axis=1)
            bounds = bucket_metadata(inputs.past_sequence_lengths, lengths, block_size=4, capacity=capacity)
            assert exact[0] <= bounds[0]
            assert bounds[2] <= exact[2] <= exact[1] <= bounds[1]
            assert bounds[1] == 4 * table_bucket(inputs.block_table.shape[1], capacity)
            decodes += 1
        state = stepped(state)
    assert decodes


@pytest.mark.parametrize(
    ("capacity", "columns", "bounds"),
    [
        (20, 18, [1, 320, 257]),
        (20, 16, [1, 256, 129]),
        (20, 9, [1, 256, 129]),
        (20, 8, [1, 128, 1]),
        (5, 5, [1, 80, 1]),
        (9, 9, [1, 144, 129]),
    ],
)
def test_G2_bounds_of_a_bucket_in_blocks_of_16(capacity, columns, bounds):
    past, lengths = np.array([columns * 16 - 1, 0]), np.array([columns, 1])
    assert bucket_metadata(past, lengths, block_size=16, capacity=capacity).tolist() == bounds
    loose = bucket_metadata(past, lengths, block_size=16, capacity=capacity, exact_tables=False)
    assert loose.tolist() == [*bounds[:2], 1]


def bounds_of(past=(15, 20), lengths=(1, 2), block_size=16, capacity=20):
    return bucket_metadata(np.array(past), np.array(lengths), block_size=block_size, capacity=capacity)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"past": (15, 32)},
            ValueError,
            "table of row 1 has 2 blocks where its KV length needs 3; reserve what is missing first",
        ),
        (
            {"past": (15, 15)},
            ValueError,
            "table of row 1 has 2 blocks where its KV length needs 1; pass exact_tables=False",
        ),
        ({"capacity": 1}, ValueError, "a table of 2 columns exceeds the capacity of 1; raise the capacity"),
        (
            {"past": (2**30 - 1, 2**30), "block_size": 2**30},
            ValueError,
            "KV length is 8589934592 and does not fit int32; lower the capacity or the block size",
        ),
        ({"block_size": 0}, ValueError, "block_size is 0; give at least 1"),
        ({"capacity": 0}, ValueError, "capacity is 0; give at least 1"),
        ({"block_size": -16}, ValueError, "block_size is -16"),
        ({"block_size": 16.0}, TypeError, "block_size is 16.0; give an integer"),
        ({"lengths": (0, 2)}, ValueError, r"table_lengths\[0\] is 0; give a value from 1"),
        ({"past": (-1, 20)}, ValueError, r"past\[0\] is -1; give a value from 0"),
        ({"past": (15,)}, ValueError, r"past is int64\[1\]; give one integer a row"),
        ({"past": (15.0, 20.0)}, ValueError, r"past is float64\[2\]"),
        (
            {"past": np.zeros(0, int), "lengths": np.zeros(0, int)},
            ValueError,
            "table_lengths is empty; give at least one row",
        ),
    ],
)
def test_G2_bounds_of_a_bucket_that_are_none_are_refused(changed, error, words):
    assert bounds_of().tolist() == [1, 128, 1]
    with pytest.raises(error, match=words):
        bounds_of(**changed)


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        (0, ValueError, "columns is 0; give at least 1"),
        (21, ValueError, "21 columns exceeds the capacity of 20"),
        (True, TypeError, "columns is True; give an integer"),
    ],
)
def test_G2_N1_a_table_without_a_bucket_is_refused(columns, error, words):
    with pytest.raises(error, match=words):
        table_bucket(columns, 20)


# G3: logits rows


@given(
    rows=st.lists(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1)
)
def test_G3_the_last_wanted_rows_of_each_row_are_read(rows):
    expected, end, boundaries = [], 0, [0]
    for count, wanted in rows:
        end += count
        expected += range(end - wanted, end)
        boundaries.append(end)
    found = logits_rows(np.array(boundaries), np.array([wanted for _, wanted in rows]))
    assert found.dtype == np.int32
    assert found.tolist() == expected
    assert logits_rows(np.array(boundaries)).tolist() == [end - 1 for end in boundaries[1:]]


def test_G3_C7_contributions_3_1_2_are_read_at_2_3_5_and_two_drafts_add_the_rows_before():
    boundaries = np.array([0, 3, 4, 6], np.int32)
    assert logits_rows(boundaries).tolist() == [2, 3, 5]
    assert logits_rows(boundaries, np.array([3, 1, 1])).tolist() == [0, 1, 2, 3, 5]
    assert logits_rows(np.array([0, 3, 6]), 2).tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("boundaries", "wanted", "words"),
    [
        ([0, 3, 4], 2, "2 logits rows are wanted of row 1, which has 1 tokens; want fewer"),
        ([0, 3, 4], 0, r"wanted\[0\] is 0; give a value from 1"),
        ([0, 3, 4], np.array([1, -1]), r"wanted\[1\] is -1"),
        ([0, 3, 4], np.array([1]), r"wanted is int64\[1\]; give one integer a row"),
        ([0, 3, 4], 1.0, r"wanted is float64\[2\]"),
        ([1, 3], 1, "does not rise from 0"),
        ([0, 3, 3], 1, "does not rise from 0; give at least one row, each with tokens"),
        ([0, 3, 2], 1, "does not rise from 0"),
        ([0], 1, "does not rise from 0; give at least one row"),
        ([[0, 1]], 1, r"cumulative_sequence_lengths is int64\[1, 2\]"),
    ],
)
def test_G3_rows_that_are_not_there_are_refused(boundaries, wanted, words):
    with pytest.raises(ValueError, match=words):
        logits_rows(np.array(boundaries), wanted)
