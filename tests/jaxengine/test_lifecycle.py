"""A request's life in the functional core: creation, turns, limits, cancelling and closing (A1 to A10, A15)."""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.requests import has_pending_work, status_of
from jaxengine.state import replace_rows, row_of
from jaxengine.toy import CONTEXT, LETTERS, continuation, next_token, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, column, finish, leaves, tokens_of

MODEL = toy_model()
PROMPT = [4, 8, 15, 16, 23]
LAST_ID = 2**64 - 1

TOKENS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20)


def created(model=MODEL, options=None, config=SMALL):
    return je.create_request(je.init_state(model, config), options)


def stepped(model, state, steps):
    for _ in range(steps):
        state, _ = je.step(model, state)
    return state


def undrained(state):
    return list(state.control.events)


def assert_refused(state, error, words, call, *arguments):
    before = leaves(state)
    with pytest.raises(error, match=words):
        call(state, *arguments)
    assert_same(before, leaves(state))


# A1: creation


def test_A1_ids_count_up_and_are_never_reused():
    state = je.init_state(MODEL, SMALL)
    seen = []
    for _ in range(3):
        state, first = je.create_request(state)
        state, second = je.create_request(state)
        state = je.close_request(je.close_request(state, second), first)
        seen += [first, second]
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "batch_size"])
def test_A1_a_folder_that_asks_for_more_than_one_sequence_is_refused_by_name(name):
    state = je.init_state(toy_model(search={name: 4}), SMALL)
    assert_refused(state, ValueError, f"search.{name}", je.create_request)
    state, _ = je.create_request(je.init_state(toy_model(search={name: 1}), SMALL))


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "batch_size"])
def test_A1_options_know_no_beams(name):
    with pytest.raises(TypeError, match=name):
        je.RequestOptions(**{name: 4})
    with pytest.raises(TypeError, match=name):
        je.SamplingParams(**{name: 4})


def test_A1_options_are_a_snapshot_that_requests_share_without_sharing_state():
    options = je.RequestOptions(max_session_tokens=8, sampling=je.SamplingParams(temperature=0.0))
    state = je.init_state(MODEL, SMALL)
    for request_id in (1, 2):
        state, _ = je.create_request(state, options)
        state, _ = je.begin_turn(state, request_id, PROMPT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_session_tokens = 60
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 1) == tokens_of(state, 2) == PROMPT + continuation(PROMPT, 3)


# A2: states


def test_A2_A9_states_of_a_life_of_two_turns():
    state, request_id = created()
    assert status_of(state, request_id) == je.RequestStatus.CREATED
    seen = []
    for turn, prompt in enumerate((PROMPT * 4, [1]), start=1):
        state, turn_id = je.begin_turn(state, request_id, prompt, je.TurnOptions(2))
        assert turn_id == turn
        seen.append(status_of(state, request_id).name)
        while has_pending_work(state):
            state, _ = je.step(MODEL, state)
            seen.append(status_of(state, request_id).name)
            state, _ = je.drain(state, 9)
        assert column(state, request_id, "place") >= 0
    # 20 tokens take two steps of at most 16; the second of them samples the first token.
    assert seen == ["QUEUED", "ACTIVE", "ACTIVE", "TURN_COMPLETE", "QUEUED", "ACTIVE", "TURN_COMPLETE"]
    state = je.close_request(state, request_id)
    assert status_of(state, request_id) == je.RequestStatus.CLOSED


def test_A2_one_step_may_lead_from_queued_to_complete():
    state = stepped(MODEL, begun(MODEL, PROMPT, limit=1), 1)
    assert status_of(state, 1) == je.RequestStatus.TURN_COMPLETE


# A3: what a turn accepts


@given(tokens=TOKENS, kind=st.sampled_from([list, tuple, np.array, np.uint8, "jax", "int64"]))
@settings(max_examples=30)
def test_A3_tokens_come_in_any_flat_sequence_of_integers_and_are_copied(tokens, kind):
    given_tokens = {
        "jax": lambda: jnp.array(tokens, jnp.int32),
        "int64": lambda: [np.int64(token) for token in tokens],
        np.uint8: lambda: np.array(tokens, np.uint8),
    }.get(kind, lambda: kind(tokens))()
    state, request_id = created()
    state, turn_id = je.begin_turn(state, request_id, given_tokens)
    assert turn_id == 1
    if isinstance(given_tokens, np.ndarray | list):
        given_tokens[0] = LETTERS - 1 - given_tokens[0]
    assert tokens_of(state, request_id) == tokens


def test_A3_reading_a_sequence_gives_a_copy():
    state = stepped(MODEL, begun(MODEL, PROMPT), 2)
    log = state.control.tokens
    for start in range(8):
        log.read(0, start, 7)[:] = 0
    assert tokens_of(state, 1) == PROMPT + continuation(PROMPT, 2)


def with_turn(state, request_id, turn):
    row = row_of(state.control, request_id)
    return state.replace(control=replace_rows(state.control, row, turn=np.uint64(turn)))


def test_A3_turn_ids_never_wrap():
    state, request_id = created()
    state, turn_id = je.begin_turn(
        with_turn(state, request_id, LAST_ID - 1), request_id, PROMPT, je.TurnOptions(1)
    )
    assert turn_id == LAST_ID
    state, events = finish(MODEL, state)
    assert [event.turn_id for event in events] == [LAST_ID]
    assert_refused(state, OverflowError, "every turn id", je.begin_turn, request_id, PROMPT)
    state, cancelled = je.cancel_turn(state, request_id, LAST_ID)
    assert not cancelled


def test_A3_turn_ids_are_local_to_a_request():
    state = begun(MODEL, PROMPT, PROMPT, limit=1)
    state, _ = finish(MODEL, state)
    state, turn_id = je.begin_turn(state, 2, [1])
    assert turn_id == 2
    assert column(state, 1, "turn") == 1


# A4: what a turn refuses


def test_A4_a_live_turn_refuses_the_next_one():
    state = begun(MODEL, PROMPT * 4)
    assert_refused(state, je.RequestStateError, "QUEUED", je.begin_turn, 1, PROMPT)
    for _ in range(3):
        state = stepped(MODEL, state, 1)
        assert_refused(state, je.RequestStateError, "ACTIVE", je.begin_turn, 1, PROMPT)


def test_A4_a_closed_request_refuses_work():
    state = je.close_request(begun(MODEL, PROMPT), 1)
    assert_refused(state, je.RequestStateError, "CLOSED", je.begin_turn, 1, PROMPT)


def test_A4_B10_undrained_events_of_the_request_refuse_its_next_turn_and_no_other():
    state = begun(MODEL, PROMPT, PROMPT, limit=1)
    state = stepped(MODEL, state, 1)
    assert [event.request_id for event in undrained(state)] == [1, 2]
    state, _ = je.drain(state, 1)
    state, turn_id = je.begin_turn(state, 1, [3])
    assert turn_id == 2
    assert_refused(state, je.RequestStateError, "not drained", je.begin_turn, 2, [3])
    state, _ = je.drain(state, 1)
    state, turn_id = je.begin_turn(state, 2, [3])
    assert turn_id == 2


@given(limit=st.integers(2, 24), prompt=TOKENS)
@settings(max_examples=60)
def test_A4_case_C16_room_for_one_generated_token_is_required(limit, prompt):
    state, request_id = created(options=je.RequestOptions(max_session_tokens=limit))
    if len(prompt) < limit:
        state, _ = je.begin_turn(state, request_id, prompt)
        assert column(state, request_id, "length") == len(prompt)
    else:
        words = rf"{len(prompt)} tokens of at most {limit}"
        assert_refused(state, ValueError, words, je.begin_turn, request_id, prompt)


def test_case_C16_fifteen_sixteen_and_seventeen_of_sixteen():
    state, request_id = created(options=je.RequestOptions(max_session_tokens=16))
    for count in (16, 17):
        assert_refused(
            state, ValueError, f"{count} tokens of at most 16", je.begin_turn, request_id, [1] * count
        )
    state, _ = je.begin_turn(state, request_id, [1] * 15)
    state, events = finish(MODEL, state)
    assert [event.token for event in events] == [next_token([1] * 15)]
    assert events[0].finish_reason == je.FinishReason.MAX_SESSION_TOKENS
    assert_refused(state, ValueError, "17 tokens of at most 16", je.begin_turn, request_id, [1])


@pytest.mark.parametrize("max_new", [None, 0, 100])
def test_case_C16_no_turn_limit_leaves_the_session_limit(max_new):
    state, request_id = created(options=je.RequestOptions(max_session_tokens=16))
    state, _ = je.begin_turn(state, request_id, PROMPT, je.TurnOptions(max_new))
    state, events = finish(MODEL, state)
    assert len(events) == 16 - len(PROMPT)
    assert events[-1].finish_reason == je.FinishReason.MAX_SESSION_TOKENS


@pytest.mark.parametrize("max_length", [4, 5, 6])
def test_case_C16_the_folders_max_length_below_at_and_above_the_prompt(max_length):
    state, request_id = created(toy_model(max_length=max_length))
    if max_length > len(PROMPT):
        state, _ = je.begin_turn(state, request_id, PROMPT)
        assert column(state, request_id, "max_session") == max_length
    else:
        assert_refused(
            state, ValueError, f"5 tokens of at most {max_length}", je.begin_turn, request_id, PROMPT
        )


# A5: the two limits


@given(turns=st.lists(st.tuples(TOKENS, st.integers(0, 5)), min_size=1, max_size=6), limit=st.integers(2, 60))
@settings(max_examples=40)
def test_A5_the_session_limit_counts_all_turns_and_the_turn_limit_one(turns, limit):
    state, request_id = created(options=je.RequestOptions(max_session_tokens=limit))
    expected: list[int] = []
    for prompt, max_new in turns:
        if len(expected) + len(prompt) >= limit:
            assert_refused(state, ValueError, f"at most {limit}", je.begin_turn, request_id, prompt)
            continue
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(max_new))
        state, events = finish(MODEL, state)
        expected += prompt
        room = limit - len(expected)
        count = min(room, max_new) if max_new else room
        expected += continuation(expected, count)
        assert tokens_of(state, request_id) == expected
        by_turn = max_new and max_new <= room
        reason = je.FinishReason.MAX_GENERATED_TOKENS if by_turn else je.FinishReason.MAX_SESSION_TOKENS
        assert [event.finish_reason for event in events] == [je.FinishReason.NONE] * (count - 1) + [reason]


@pytest.mark.parametrize("unset", [None, 0])
@pytest.mark.parametrize(("max_length", "expected"), [(None, CONTEXT), (40, 40)])
def test_A5_no_session_limit_means_the_folders_max_length_else_the_context(unset, max_length, expected):
    state, request_id = created(toy_model(max_length=max_length), je.RequestOptions(max_session_tokens=unset))
    assert column(state, request_id, "max_session") == expected


def test_A5_a_session_limit_above_the_models_is_refused():
    state = je.init_state(toy_model(max_length=40), SMALL)
    assert_refused(
        state, ValueError, "is 41; .* at most 40", je.create_request, je.RequestOptions(max_session_tokens=41)
    )
    state, _ = je.create_request(state, je.RequestOptions(max_session_tokens=40))


# A6: atomic admission


def test_A6_a_first_turn_that_fails_anywhere_leaves_a_created_request_that_can_begin(monkeypatch):
    state, request_id = created()
    before = leaves(state)
    for tokens in ([], [LETTERS + 99], [-1], [1.5], [1] * CONTEXT, "text", None):
        with pytest.raises((ValueError, TypeError)):
            je.begin_turn(state, request_id, tokens)
    for target in ("next_stamp", "replace_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(je.requests, target, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                je.begin_turn(state, request_id, PROMPT)
    assert_same(before, leaves(state))
    assert status_of(state, request_id) == je.RequestStatus.CREATED
    state, turn_id = je.begin_turn(state, request_id, PROMPT)
    assert turn_id == 1
    assert tokens_of(state, request_id) == PROMPT


def test_A6_a_deferred_first_turn_owns_nothing_and_starts_later():
    state = begun(MODEL, [1] * 40, [2] * 40, limit=1)
    state = stepped(MODEL, state, 1)
    assert status_of(state, 2) == je.RequestStatus.QUEUED
    assert column(state, 2, "place") == -1
    assert tokens_of(state, 2) == [2] * 40
    state = stepped(MODEL, state, 3)
    state = je.close_request(state, 1)
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 2) == [2] * 40 + continuation([2] * 40, 1)


# A7: how a turn ends

REASONS = st.tuples(st.booleans(), st.booleans(), st.booleans())


@given(prompt=TOKENS, coincide=REASONS)
@settings(max_examples=40)
def test_A7_the_first_of_eos_turn_limit_and_session_limit_is_reported(prompt, coincide):
    eos, turn_limit, session_limit = coincide
    token = next_token(prompt)
    model = toy_model(eos=[token] if eos else [])
    options = je.RequestOptions(max_session_tokens=len(prompt) + 1 if session_limit else None)
    state, request_id = created(model, options)
    state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(1 if turn_limit else 0))
    while not undrained(state):
        state = stepped(model, state, 1)
    event = undrained(state)[0]
    expected = (
        je.FinishReason.EOS
        if eos
        else je.FinishReason.MAX_GENERATED_TOKENS
        if turn_limit
        else je.FinishReason.MAX_SESSION_TOKENS
        if session_limit
        else je.FinishReason.NONE
    )
    assert event.finish_reason == expected
    ended = status_of(state, request_id) == je.RequestStatus.TURN_COMPLETE
    assert (
        ended == (expected != je.FinishReason.NONE) == bool(event.flags & je.EngineEventFlags.TURN_FINISHED)
    )
    assert bool(event.flags & je.EngineEventFlags.TOKEN) == (not eos)
    assert tokens_of(state, request_id) == (prompt if eos else [*prompt, token])
    assert event.usage == je.Usage(prompt_tokens=len(prompt), generated_tokens=0 if eos else 1)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("others", [[], [30], [31, 30]])
def test_A7_K5_case_C9_any_id_of_the_eos_list_ends_and_none_is_seen(position, others):
    answer = continuation(PROMPT, position + 1)
    assert answer[-1] not in answer[:-1]
    model = toy_model(eos=[*others, answer[-1]])
    state, events = finish(model, begun(model, PROMPT))
    assert [event.token for event in events] == [*answer[:-1], -1]
    assert [event.flags for event in events][-1] == je.EngineEventFlags.TURN_FINISHED
    assert events[-1].finish_reason == je.FinishReason.EOS
    assert tokens_of(state, 1) == PROMPT + answer[:-1]
    assert events[-1].usage == je.Usage(prompt_tokens=len(PROMPT), generated_tokens=position)


def test_A7_a_turn_ends_once():
    state = begun(MODEL, PROMPT, [9], limit=3)
    state, events = finish(MODEL, state)
    for request_id in (1, 2):
        mine = [event for event in events if event.request_id == request_id]
        finished = [bool(event.flags & je.EngineEventFlags.TURN_FINISHED) for event in mine]
        assert finished == [False, False, True]
        assert all(bool(event.finish_reason) == end for event, end in zip(mine, finished, strict=True))


# A8: cancelling


def test_A8_before_the_first_turn_and_after_close_cancelling_is_an_error():
    state, request_id = created()
    assert_refused(state, je.RequestStateError, "no turn yet", je.cancel_turn, request_id, 0)
    state = je.close_request(state, request_id)
    assert_refused(state, je.RequestStateError, "CLOSED", je.cancel_turn, request_id, 1)


@pytest.mark.parametrize("turn_id", [0, 2, -1, LAST_ID, 2**70])
def test_A8_unknown_turns_are_not_cancelled(turn_id):
    state = begun(MODEL, PROMPT)
    before = leaves(state)
    after, cancelled = je.cancel_turn(state, 1, turn_id)
    assert not cancelled
    assert_same(before, leaves(after))


def test_A8_stale_and_finished_turns_are_not_cancelled():
    state, _ = finish(MODEL, begun(MODEL, PROMPT, limit=1))
    state, cancelled = je.cancel_turn(state, 1, 1)
    assert not cancelled
    state, _ = je.begin_turn(state, 1, [1])
    state, cancelled = je.cancel_turn(state, 1, 1)
    assert not cancelled
    state, cancelled = je.cancel_turn(state, 1, 2)
    assert cancelled
    state, cancelled = je.cancel_turn(state, 1, 2)
    assert not cancelled
    assert len(undrained(state)) == 1


@given(
    prompt=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=30),
    steps=st.integers(0, 4),
    then=TOKENS,
    chunk=st.sampled_from([None, 4]),
)
@settings(max_examples=60)
def test_A8_A15_whenever_a_turn_is_cancelled_all_its_tokens_count_and_the_next_turn_goes_on_from_them(
    prompt, steps, then, chunk
):
    config = dataclasses.replace(SMALL, chunk_size=chunk)
    state = stepped(MODEL, begun(MODEL, prompt, config=config), steps)
    state, _ = je.drain(state, 99)
    length, processed = column(state, 1, "length"), column(state, 1, "processed")
    sequence = tokens_of(state, 1)
    assert sequence == prompt + continuation(prompt, length - len(prompt))
    state, cancelled = je.cancel_turn(state, 1, 1)
    assert cancelled
    (event,) = undrained(state)
    assert event.finish_reason == je.FinishReason.CANCELLED
    assert event.flags == je.EngineEventFlags.TURN_FINISHED
    assert event.usage == je.Usage(len(prompt), length - len(prompt))
    assert (column(state, 1, "length"), column(state, 1, "processed")) == (length, processed)
    if steps == 0:
        assert column(state, 1, "place") == -1
        assert len(state.control.free_blocks) == config.num_blocks
    if length > len(prompt):
        assert processed == length - 1
    je.check_invariants(state)

    if length + len(then) + 3 >= CONTEXT:
        return
    state, _ = je.drain(state, 1)
    state, _ = je.begin_turn(state, 1, then, je.TurnOptions(3))
    state, events = finish(MODEL, state)
    expected = sequence + then
    assert tokens_of(state, 1) == expected + continuation(expected, 3)
    assert events[-1].usage == je.Usage(len(then), 3)


# A10: closing


@pytest.mark.parametrize("steps", range(6))
def test_A10_closing_from_any_state_frees_everything_and_drops_its_events_only(steps):
    """CREATED, QUEUED, partial prefill, first token, decode, complete."""
    state, request_id = created()
    state, other = je.create_request(state)
    state, _ = je.begin_turn(state, other, [7, 7], je.TurnOptions(1))
    if steps:
        state, _ = je.begin_turn(state, request_id, PROMPT * 4, je.TurnOptions(2))
        state = stepped(MODEL, state, steps - 1)
    kept = [event for event in undrained(state) if event.request_id == other]
    state = je.close_request(state, request_id)
    je.check_invariants(state)
    assert status_of(state, request_id) == je.RequestStatus.CLOSED
    assert undrained(state) == kept
    held = int(state.control.blocks_held.sum())
    assert len(state.control.free_blocks) == SMALL.num_blocks - held
    assert held <= 1
    again = je.close_request(state, request_id)
    assert_same(leaves(state), leaves(again))
    state, _ = finish(MODEL, state)
    assert tokens_of(state, other) == [7, 7, next_token([7, 7])]


def test_A10_a_closed_requests_blocks_and_place_serve_the_next_one_with_none_of_its_tokens():
    state = begun(MODEL, [1] * 60, limit=1)
    state = stepped(MODEL, state, 4)
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, [2] * 60, je.TurnOptions(1))
    assert je.plan_step(state).outcome == je.StepOutcome.CAPACITY_DEFERRED
    state = je.close_request(state, 1)
    state, _ = finish(MODEL, state)
    assert tokens_of(state, request_id) == [2] * 60 + continuation([2] * 60, 1)


# A15: processed and unprocessed


@given(prompt=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=40), chunk=st.integers(1, 16))
@settings(max_examples=40)
def test_A15_a_partial_prefill_moves_processed_only_and_decode_keeps_one_behind(prompt, chunk):
    state = begun(MODEL, prompt, config=dataclasses.replace(SMALL, chunk_size=chunk))
    done = 0
    while done < len(prompt):
        assert tokens_of(state, 1) == prompt
        assert not undrained(state)
        state = stepped(MODEL, state, 1)
        done += min(chunk, len(prompt) - done)
        assert column(state, 1, "processed") == done
    for generated in range(1, 4):
        assert column(state, 1, "length") == len(prompt) + generated
        assert column(state, 1, "processed") == len(prompt) + generated - 1
        state = stepped(MODEL, state, 1)


def test_A15_after_eos_nothing_is_unprocessed_and_after_a_limit_one_token_is():
    model = toy_model(eos=[next_token(PROMPT)])
    state, _ = finish(model, begun(model, PROMPT))
    assert column(state, 1, "processed") == column(state, 1, "length") == len(PROMPT)
    state, _ = finish(MODEL, begun(MODEL, PROMPT, limit=2))
    assert column(state, 1, "processed") == column(state, 1, "length") - 1 == len(PROMPT) + 1
    state, _ = je.begin_turn(state, 1, [6, 6])
    (row,) = je.plan_step(state).rows
    assert (row.num_tokens, row.is_prefill) == (3, True)
