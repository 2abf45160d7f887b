"""What proposing takes and refuses, what one step makes of drafts, and who comes before them (M1, M2, M4, M5)."""

import dataclasses

import numpy as np
import pytest

import jaxengine as je
from jaxengine.state import row_of
from jaxengine.toy import VOCAB, continuation, toy_model, with_params
from tests.jaxengine.harness import SMALL, assert_same, begun, column, finish, leaves, tokens_of

MODEL = toy_model()
PROMPT = [3, 1, 4, 1, 5]
NEXT = continuation(PROMPT, 30)


def decoding(limit=0, config=SMALL, model=MODEL, prompts=(PROMPT,), steps=1):
    """A state some steps on; its events are drained."""
    state = begun(model, *prompts, limit=limit, config=config)
    for _ in range(steps):
        state, _ = je.step(model, state)
    return je.drain(state, 100)[0]


def proposed(state, request_id=1):
    return state.control.requests.carried[row_of(state.control, request_id)].drafts


def stepped(state, model=MODEL):
    """The state after one step and checks, and the step's events, drained."""
    state, events = je.step(model, state)
    je.check_invariants(state)
    return je.drain(state, 100)[0], events


def said(events):
    return [event.token for event in events]


# M1


def test_M1_a_proposal_is_kept_replaced_and_cleared_and_each_call_is_a_value():
    state = decoding()
    first = je.set_draft_tokens(state, 1, NEXT[1:4])
    second = je.set_draft_tokens(first, 1, np.array([7, 8], np.int64))
    cleared = je.set_draft_tokens(second, 1, [])
    assert [proposed(s) for s in (state, first, second, cleared)] == [(), tuple(NEXT[1:4]), (7, 8), ()]
    assert [column(s, 1, "num_drafts") for s in (state, first, second, cleared)] == [0, 3, 2, 0]
    for each in (first, second, cleared):
        je.check_invariants(each)
    stamps = {column(s, 1, "stamp") for s in (state, first, second, cleared)}
    assert len(stamps) == 4


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, VOCAB], f"token {VOCAB} is outside the vocabulary"),
        ([-1], "token -1 is outside the vocabulary"),
        ([1.5], "the drafts are .*flat sequence of integers"),
        ([[1, 2]], "the drafts are .*flat sequence of integers"),
        ([[1], [2, 3]], "the drafts are .*flat sequence of integers"),
        (7, "the drafts are .*flat sequence of integers"),
        ("ab", "the drafts are .*flat sequence of integers"),
        ([0] * 16, "16 drafts are too many for request 1; give at most 15"),
    ],
)
def test_M1_a_refused_proposal_leaves_the_old_one(tokens, message):
    state = je.set_draft_tokens(decoding(), 1, [7, 8])
    before = leaves(state)
    with pytest.raises(ValueError, match=message):
        je.set_draft_tokens(state, 1, tokens)
    assert_same(before, leaves(state))


@pytest.mark.parametrize(
    ("limit", "session", "most"),
    [(5, 40, 3), (2, 40, 0), (30, 10, 3), (30, 7, 0), (0, 10, 3), (9, 10, 3), (0, 0, 15)],
)
def test_M1_one_token_must_fit_behind_the_drafts_under_both_limits(limit, session, most):
    state = je.init_state(MODEL, SMALL)
    state, _ = je.create_request(state, je.RequestOptions(max_session_tokens=session))
    state, _ = je.begin_turn(state, 1, PROMPT, je.TurnOptions(limit))
    state, _ = stepped(state)
    assert column(state, 1, "length") == 6
    with pytest.raises(ValueError, match=f"{most + 1} drafts are too many .* give at most {most}"):
        je.set_draft_tokens(state, 1, NEXT[1 : 2 + most])
    state, events = stepped(je.set_draft_tokens(state, 1, NEXT[1 : 1 + most]))
    assert said(events) == NEXT[1 : 2 + most]
    ends = (limit == 1 + len(events) or session == 6 + len(events)) and most < 15
    assert bool(events[-1].flags & je.EngineEventFlags.TURN_FINISHED) == ends
    _, rest = finish(MODEL, state)
    assert len(said(events)) + len(rest) + 1 == min(limit or 99, (session or 64) - 5)


def test_M1_the_most_drafts_are_what_one_row_can_run_less_one():
    for config, most in [
        (SMALL, 15),
        (dataclasses.replace(SMALL, chunk_size=4), 3),
        (dataclasses.replace(SMALL, chunk_size=1), 0),
        (dataclasses.replace(SMALL, max_scheduled_tokens=1), 0),
    ]:
        assert je.max_draft_tokens_per_proposal(je.init_state(MODEL, config)) == most
    assert je.Engine(MODEL, SMALL).max_draft_tokens_per_proposal() == 15


def test_M1_only_a_request_past_its_input_takes_drafts():
    state = je.init_state(MODEL, dataclasses.replace(SMALL, chunk_size=3))
    state, _ = je.create_request(state)

    def refused(state, words, kind=je.RequestStateError):
        before = leaves(state)
        for tokens in ([1], []):
            with pytest.raises(kind, match=words):
                je.set_draft_tokens(state, 1, tokens)
        assert_same(before, leaves(state))

    refused(state, "request 1 is CREATED")
    state, _ = je.begin_turn(state, 1, PROMPT, je.TurnOptions(2))
    refused(state, "request 1 is still at its input")
    state, _ = stepped(state)
    assert column(state, 1, "processed") == 3
    refused(state, "request 1 is still at its input")
    state, _ = stepped(state)
    state = je.set_draft_tokens(state, 1, [])
    cancelled, _ = je.cancel_turn(je.set_draft_tokens(decoding(), 1, [9]), 1, 1)
    assert proposed(cancelled) == ()
    je.check_invariants(cancelled)
    refused(cancelled, "request 1 is TURN_COMPLETE")
    state, _ = stepped(state)
    refused(state, "request 1 is TURN_COMPLETE")
    refused(je.close_request(state, 1), "request 1 is CLOSED")
    with pytest.raises(ValueError, match="no request 2"):
        je.set_draft_tokens(state, 2, [1])
    spent = begun(MODEL, PROMPT)
    je.step(MODEL, spent)
    with pytest.raises(je.SpentStateError):
        je.set_draft_tokens(spent, 1, [1])


def test_M1_a_handle_proposes_and_a_closed_one_does_not():
    engine = je.Engine(MODEL, SMALL)
    request = engine.create_request()
    request.begin_turn(PROMPT, je.TurnOptions(6))
    engine.run()
    request.set_draft_tokens(NEXT[1:5])
    assert said(engine.run()) == NEXT[1:6]
    metrics = engine.metrics
    assert (metrics.steps, metrics.drafted_tokens, metrics.accepted_drafts) == (2, 4, 4)
    request.close()
    with pytest.raises(je.RequestStateError, match="CLOSED"):
        request.set_draft_tokens([1])


# M2


@pytest.mark.parametrize("model", [MODEL, toy_model(hybrid=True)], ids=["plain", "hybrid"])
@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_M2_a_accepted_drafts_commit_a_plus_one_slots_and_publish_in_order_in_one_step(model, accepted):
    hybrid = bool(model.decoder.fixed)
    expected = continuation(PROMPT, 12, hybrid=hybrid)
    drafts = [*expected[1 : 1 + accepted], *[(t + 1) % 28 for t in expected[1 + accepted : 5]]]
    state = decoding(model=model)
    length, processed = column(state, 1, "length"), column(state, 1, "processed")
    state, events = stepped(je.set_draft_tokens(state, 1, drafts), model)
    assert said(events) == expected[1 : 2 + accepted]
    assert [event.usage.generated_tokens for event in events] == list(range(2, 3 + accepted))
    assert column(state, 1, "length") - length == column(state, 1, "processed") - processed == accepted + 1
    assert state.control.blocks_held[0] == -(-(processed + accepted + 1) // 4)
    assert proposed(state) == ()
    for _ in range(3):
        state, events = stepped(state, model)
    assert tokens_of(state, 1) == PROMPT + expected[: accepted + 5]


@pytest.mark.parametrize("place", [2, 3, 4, 5])
@pytest.mark.parametrize("limit", [0, 4, 6])
def test_M2_case_C4_an_eos_inside_ends_the_turn_and_what_follows_it_does_not_count(place, limit):
    """The first of EOS and limit wins: ids, events, usage and committed slots end there."""
    model = toy_model(eos=[NEXT[place]])
    first = NEXT.index(NEXT[place])
    state = decoding(limit=limit, model=model)
    room = 15 if limit == 0 else limit - 2
    state, events = stepped(je.set_draft_tokens(state, 1, NEXT[1:9][:room]), model)
    count = min(first, limit or first)
    reason = (
        je.FinishReason.EOS if count == first and count != limit else je.FinishReason.MAX_GENERATED_TOKENS
    )
    assert [e.token for e in events if e.flags & je.EngineEventFlags.TOKEN] == NEXT[1:count]
    assert [e.finish_reason for e in events[:-1]] == [je.FinishReason.NONE] * (len(events) - 1)
    assert (events[-1].finish_reason, events[-1].usage.generated_tokens) == (reason, count)
    assert tokens_of(state, 1) == PROMPT + NEXT[:count]
    # As in plain decoding, the token that reaches a limit has not run, one before an EOS has.
    ran = reason is je.FinishReason.EOS
    assert column(state, 1, "processed") == len(PROMPT) + count - (not ran)
    assert column(state, 1, "status") == je.RequestStatus.TURN_COMPLETE


@pytest.mark.parametrize("limit", [5, 6])
def test_case_C4_a_stop_string_inside_ends_ids_text_logprobs_and_usage_at_one_place(limit):
    """Stop string at the fifth token: the fifth is its last, and wins over a limit there."""
    model = toy_model(text=True)
    letters = "abcdefghijklmnopqrstuvwxyz ."
    stop = "".join(letters[token] for token in NEXT[3:5])
    sampling = je.SamplingParams(temperature=0.0, stop=(stop,), logprobs=1)
    state = je.init_state(model, SMALL)
    state, _ = je.create_request(state, je.RequestOptions(sampling=sampling))
    state, _ = je.begin_turn(state, 1, PROMPT, je.TurnOptions(limit))
    state, first = stepped(state, model)
    state, events = stepped(je.set_draft_tokens(state, 1, NEXT[1 : limit - 1]), model)
    assert said(events) == NEXT[1:5]
    assert "".join(event.text for event in (*first, *events)) == "".join(letters[t] for t in NEXT[:3])
    assert (events[-1].finish_reason, events[-1].stop) == (je.FinishReason.STOP_STRING, stop)
    assert events[-1].usage.generated_tokens == 5
    assert [event.logprobs.top[0][0] for event in events] == NEXT[1:5]
    assert tokens_of(state, 1) == PROMPT + NEXT[:5]
    assert column(state, 1, "processed") == len(PROMPT) + 4


# D4: stamps


def test_M5_D4_a_transaction_is_stale_after_another_proposal_and_fresh_beside_one_for_someone_else():
    for old in ([], NEXT[1:3]):
        state = je.set_draft_tokens(decoding(prompts=(PROMPT, [9])), 1, old)
        for drafts in ([], old, [5]):
            transaction = je.execute(MODEL, state, je.plan_step(state))
            with pytest.raises(je.StaleTransactionError, match="request 1 changed"):
                je.commit(je.set_draft_tokens(state, 1, drafts), transaction)
            with pytest.raises(ValueError, match="request 1 changed"):
                je.execute(MODEL, je.set_draft_tokens(state, 1, drafts), transaction.plan)


# M5: who keeps a proposal


def test_M5_a_dropped_transaction_and_a_fault_at_any_stage_keep_the_proposal():
    state = je.set_draft_tokens(decoding(), 1, NEXT[1:4])
    before = leaves(state)
    je.execute(MODEL, state, je.plan_step(state))
    assert_same(before, leaves(state))
    for stage in je.Stage:
        if stage is je.Stage.PUBLISH:
            continue
        with je.inject_fault(stage, je.RetryableStepError("injected")) as fault:
            with pytest.raises(je.RetryableStepError):
                je.step(MODEL, state)
            assert fault.fired
        assert_same(before, leaves(state))
        assert proposed(state) == tuple(NEXT[1:4])
    with je.inject_fault(je.Stage.PUBLISH, RuntimeError("injected")):
        transaction = je.execute(MODEL, state, je.plan_step(state))
        with pytest.raises(je.StepError):
            je.commit(state, transaction, donate=False)
    assert_same(before, leaves(state))
    state, events = stepped(state)
    assert said(events) == NEXT[1:5]


@pytest.mark.parametrize("stage", [stage for stage in je.Stage if stage is not je.Stage.PUBLISH])
def test_M5_F1_the_engine_tries_the_same_drafts_again(stage):
    engine = je.Engine(MODEL, SMALL)
    request = engine.create_request()
    request.begin_turn(PROMPT, je.TurnOptions(8))
    engine.run()
    request.set_draft_tokens(NEXT[1:4])
    with je.inject_fault(stage, je.RetryableStepError("injected")):
        assert all(event.request is None for event in engine.run())
    assert proposed(engine.state) == tuple(NEXT[1:4])
    assert said(engine.run()) == NEXT[1:5]


def test_M5_logits_that_are_not_finite_drop_the_step_and_keep_the_drafts():
    state = je.set_draft_tokens(decoding(), 1, NEXT[1:4])
    with pytest.raises(je.RetryableStepError, match="request 1 are not finite"):
        je.step(with_params(MODEL, poison=True), state)
    assert proposed(state) == tuple(NEXT[1:4])
    state, events = stepped(state)
    assert said(events) == NEXT[1:5]


@pytest.mark.slow
def test_M2_a_choice_that_cannot_be_made_behind_accepted_drafts_takes_nothing_from_those_before_it():
    """What plain decoding says before it comes to the same end is said with drafts, too."""
    sampling = je.SamplingParams(temperature=0.0, no_repeat_ngram_size=1)
    prompt = list(range(25))
    events = {}
    for drafts in (False, True):
        engine = je.Engine(MODEL, SMALL)
        request = engine.create_request(je.RequestOptions(sampling=sampling))
        request.begin_turn(prompt)
        events[drafts] = engine.run() + engine.run()
        assert len(events[drafts]) == 1
        if drafts:
            request.set_draft_tokens([*said(events[False])[1:3], 0, 0])
        while engine.has_pending_requests():
            events[drafts] += engine.run()
    told = [
        [(e.token, e.finish_reason, e.error_code, e.usage) for e in events[d] if e.request] for d in events
    ]
    assert [token for token, *_ in told[0]][-1] == -1
    assert len(told[0]) == 4
    assert told[1] == told[0]
