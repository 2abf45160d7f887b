"""Turns under grammars: what they say, in any company, by any course of steps (L1, L2, L5, K6, M3, M6)."""

import dataclasses
import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.breaking import KINDS, SURVIVED
from tests.jaxengine.guided_turns import (
    CONFIG,
    ENDED,
    EOS,
    GREEDY,
    MODEL,
    WORDS,
    Job,
    ids,
    said,
    serve,
    unforced,
)
from tests.jaxengine.harness import assert_same, finish, leaves, tokens_of

EOS_REASON = je.FinishReason.EOS
SAMPLED = je.SamplingParams(temperature=1.5, seed=11, logprobs=3, logprobs_from="sampling")
CUT = dataclasses.replace(CONFIG, max_scheduled_tokens=5, chunk_size=3)
TIGHT = dataclasses.replace(CONFIG, num_blocks=9, max_batch_size=3)

prompts = st.lists(st.integers(0, 26), min_size=1, max_size=12).map(tuple)
jobs = st.builds(
    Job,
    prompts,
    st.sampled_from([None, *(grammar for grammar, _ in WORDS.values())]),
    st.integers(1, 24),
    st.sampled_from([GREEDY, SAMPLED, je.SamplingParams(temperature=0.0, repetition_penalty=1.5)]),
    st.sampled_from([None, je.NgramDrafts(shortest=1)]),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(prompts, st.sampled_from(sorted(WORDS)))
def test_L1_L5_a_turn_says_the_likeliest_of_what_its_grammar_allows(prompt, kind):
    grammar, words = WORDS[kind]
    ((result,), _) = serve([Job(prompt, grammar)])
    assert result.text == said(prompt, words)
    assert result.tokens == ids(result.text)
    assert result.text in words
    assert (result.reason, result.terminals, result.detail) == (EOS_REASON, 1, "")
    if kind == "json":
        assert json.loads(result.text) in (True, False, None)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(jobs, min_size=2, max_size=4), st.sampled_from([CONFIG, CUT, TIGHT]))
def test_L4_L5_M3_guided_and_unguided_rows_say_what_each_says_alone(batch, config):
    """Whole and cut prompts, enough blocks and too few, drafts of either kind."""
    batch = [
        dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, seed=n))
        for n, job in enumerate(batch)
    ]
    together, engine = serve(batch, config)
    for job, result in zip(batch, together, strict=True):
        plain = dataclasses.replace(job, proposer=None)
        with unforced():
            ((alone,), _) = serve([plain])
        assert result == alone
        if job.grammar is not None and result.reason == EOS_REASON:
            assert result.text in next(words for grammar, words in WORDS.values() if grammar == job.grammar)
    assert engine.state.control.failure is None


def test_L5_a_tight_pool_preempts_guided_rows():
    """The example above that needs it, so that it is known to happen."""
    grammar, words = WORDS["forced"]
    config = dataclasses.replace(CONFIG, num_blocks=10)
    batch = [Job((n, *range(5)), grammar) for n in range(4)]
    results, engine = serve(batch, config)
    assert engine.metrics.preemptions > 0
    assert [result.text for result in results] == [said(job.prompt, words) for job in batch]


def test_L5_forced_spans_run_in_one_step():
    grammar, words = WORDS["forced"]
    ((result,), engine) = serve([Job((3, 1), grammar)])
    # The first letter, " marks the spot" with the choice behind it, and " again" or the end.
    assert result.text in words
    assert engine.metrics.steps <= 3
    with unforced():
        ((plain,), slow) = serve([Job((3, 1), grammar)])
    assert plain == result
    assert slow.metrics.steps == len(result.tokens) + 1


@pytest.mark.parametrize("limit", [1, 2, 5, 15, 16, 17])
@pytest.mark.parametrize(
    "sampling", [je.SamplingParams(temperature=0.0, logprobs=2), SAMPLED], ids=["greedy", "sampled"]
)
def test_L5_case_C28_limits_inside_a_forced_span_cut_it_where_plain_decoding_does(limit, sampling):
    grammar, words = WORDS["forced"]
    job = Job((3, 1), grammar, limit, sampling)
    ((result,), engine) = serve([job])
    with unforced():
        ((plain,), slow) = serve([job])
    assert result == plain
    assert all(logprobs is not None for logprobs in result.logprobs)
    assert engine.metrics.steps <= min(3, slow.metrics.steps)
    if len(result.tokens) == limit:
        assert result.reason == je.FinishReason.MAX_GENERATED_TOKENS
    assert any(word.startswith(result.text) for word in words)


def test_L5_a_stop_string_inside_a_forced_span_ends_the_turn_there():
    grammar, _ = WORDS["forced"]
    ((result,), _) = serve([Job((3, 1), grammar, sampling=je.SamplingParams(temperature=0.0, stop="ks t"))])
    assert result.reason == je.FinishReason.STOP_STRING
    assert re.fullmatch("[xy] mar", result.text)
    assert len(result.tokens) == 9


def test_K6_L1_a_turns_own_grammar_holds_for_it_alone_and_each_turn_starts_afresh():
    engine = je.Engine(MODEL, CONFIG)
    (regex, words), (other, others) = WORDS["regex"], WORDS["json"]
    request = engine.create_request(je.RequestOptions(grammar=regex))
    for turn, (own, allowed) in enumerate(((None, words), (other, others), (None, words), (None, words))):
        request.begin_turn([turn, 5], je.TurnOptions(grammar=own))
        history = request.tokens.tolist()
        text = "".join(event.text for event in request.stream())
        assert text == said(history, allowed)
        assert request.tokens.tolist() == [*history, *ids(text)]


def test_K6_a_request_without_a_grammar_has_one_for_a_turn():
    engine = je.Engine(MODEL, CONFIG)
    request = engine.create_request(je.RequestOptions(sampling=je.SamplingParams(ignore_eos=True)))
    own = je.SamplingParams(temperature=0.0)
    for grammar in (None, WORDS["regex"][0], None):
        options = je.TurnOptions(6, own if grammar else None, grammar)
        request.begin_turn([3], options)
        history = request.tokens.tolist()
        for _ in request.stream():
            pass
        expected = ids(said(history, WORDS["regex"][1], 6)) if grammar else continuation(history, 6)
        assert request.tokens.tolist() == [*history, *expected]


def two_turns():
    state = je.init_state(MODEL, CONFIG)
    for prompt, kind in (((3, 1), "forced"), ((4,), "json")):
        state, request_id = je.create_request(state, je.RequestOptions(grammar=WORDS[kind][0]))
        state, _ = je.begin_turn(state, request_id, prompt)
    return state


def test_L2_a_dropped_step_leaves_the_grammar_where_it_was():
    """Every step is executed three times, committed once without and once with the store's donation."""
    state, events = two_turns(), []
    while je.requests.has_pending_work(state) and je.plan_step(state).outcome == je.StepOutcome.COMMITTED:
        before = leaves(state)
        je.execute(MODEL, state, je.plan_step(state))
        first, _ = je.commit(state, je.execute(MODEL, state, je.plan_step(state)), donate=False)
        assert_same(leaves(state), before)
        state, made = je.step(MODEL, state)
        assert_same(leaves(state), leaves(first))
        events += made
    ended, _ = finish(MODEL, two_turns())
    for request_id, kind in ((1, "forced"), (2, "json")):
        assert tokens_of(state, request_id) == tokens_of(ended, request_id)
        assert "".join(event.text for event in events if event.request_id == request_id) in WORDS[kind][1]


def test_L2_an_older_state_goes_on_after_the_newer_one_has_ended():
    """Kept states are run to the end in reverse order: no cursor remembers that others went further."""
    state, kept = two_turns(), []
    while je.plan_step(state).outcome == je.StepOutcome.COMMITTED:
        kept.append(state)
        state, _ = je.commit(state, je.execute(MODEL, state, je.plan_step(state)), donate=False)
    last = [tokens_of(state, request_id) for request_id in (1, 2)]
    for older in reversed(kept):
        while je.plan_step(older).outcome == je.StepOutcome.COMMITTED:
            older, _ = je.commit(older, je.execute(MODEL, older, je.plan_step(older)), donate=False)
        assert [tokens_of(older, request_id) for request_id in (1, 2)] == last


@pytest.mark.parametrize(("stage", "kind"), SURVIVED)
def test_L2_L3_F8_a_fault_at_any_stage_changes_nothing_of_what_is_said(stage, kind):
    """In the first step and in the one after it, which runs forced spans; an engine that isolates goes on."""
    batch = [Job((3, 1), WORDS["forced"][0]), Job((4,), WORDS["json"][0]), Job((7, 7), None, 5)]
    expected, _ = serve(batch)
    config = dataclasses.replace(CONFIG, failure_policy="isolate")
    with (
        je.inject_fault(stage, KINDS[kind]()) as first,
        je.inject_fault(stage, KINDS[kind](), skip=2) as other,
    ):
        results, _ = serve(batch, config)
    assert first.fired
    assert other.fired
    assert results == expected


def test_L5_M4_a_span_longer_than_a_step_can_verify_runs_in_parts():
    grammar, words = WORDS["forced"]
    ((result,), engine) = serve([Job((3, 1), grammar)], CUT)
    assert result.text == said((3, 1), words)
    assert engine.metrics.steps < len(result.tokens)


def test_M3_L5_a_callers_drafts_are_verified_under_the_grammar():
    """Right, wrong, forbidden and ending drafts take the place of the forced span; the text is the same."""
    grammar, words = WORDS["forced"]
    for drafts in (ids(" marks"), ids(" marx"), [EOS], [0, 1, 2], [*ids(" marks"), EOS], [30]):
        engine = je.Engine(MODEL, CONFIG)
        request = engine.create_request(je.RequestOptions(grammar=grammar))
        request.begin_turn([3, 1])
        events = engine.run()
        request.set_draft_tokens(drafts)
        events += list(request.stream())
        assert "".join(event.text for event in events) == said((3, 1), words)
        assert events[-1].finish_reason == EOS_REASON
        assert ENDED in events[-1].flags


def test_M5_case_C6_an_end_inside_a_span_leaves_nothing_for_the_next_turn():
    """EOS among the drafts ends the turn, and the grammar starts afresh behind it."""
    grammar, words = je.Grammar.regex("ab"), ("ab",)
    engine = je.Engine(MODEL, CONFIG)
    request = engine.create_request(je.RequestOptions(grammar=grammar))
    for turn in range(3):
        request.begin_turn([turn, 2])
        history = request.tokens.tolist()
        first = engine.run()
        assert [event.token for event in first] == [0]
        request.set_draft_tokens([*ids("b"), EOS])
        events = [*first, *request.stream()]
        assert "".join(event.text for event in events) == said(history, words)
        assert request.tokens.tolist() == [*history, *ids("ab")]
    assert engine.metrics.drafted_tokens == 6


def test_case_C28_a_stop_token_ends_a_turn_only_where_the_grammar_may_end():
    """Else an answer that the grammar hasn't finished would look like a finished one."""
    stops = je.SamplingParams(temperature=0.0, stop_token_ids=ids("abc"))
    ended = set()
    for prompt in range(8):
        ((result,), _) = serve([Job((prompt,), je.Grammar.regex("[a-f]{3,5}"), sampling=stops)])
        assert re.fullmatch("[d-f]{3,5}", result.text)
        assert result.reason == EOS_REASON
        ended.add(len(result.text))
    assert min(ended) < 5


VARIANTS = {
    "hybrid": (toy_model(text=True, eos=(EOS,), hybrid=True), CONFIG),
    "rings": (toy_model(text=True, eos=(EOS,), window=3), dataclasses.replace(CONFIG, chunk_size=4)),
    "static": (MODEL, dataclasses.replace(CONFIG, batching="static", num_blocks=None, block_size=16)),
    "session": (toy_model(text=True, eos=(EOS,), max_length=11), CONFIG),
    "one token a step": (MODEL, dataclasses.replace(CONFIG, chunk_size=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_L5_I2_J2_O1_forced_spans_change_nothing_whatever_state_a_model_has(variant):
    """Fixed states, rings that a span may lap, contiguous caches, a session that ends inside, no room for drafts."""
    model, config = VARIANTS[variant]
    batch = [Job((3, 1), WORDS["forced"][0]), Job((4,), WORDS["json"][0]), Job((9, 2, 6), WORDS["lark"][0])]
    results, engine = serve(batch, config, model)
    with unforced(model):
        plain, slow = serve(batch, config, model)
    assert results == plain
    if variant == "session":
        assert {result.reason for result in results} == {EOS_REASON, je.FinishReason.MAX_SESSION_TOKENS}
    assert (engine.metrics.drafted_tokens > 0) == (variant not in ("static", "one token a step"))
    assert slow.metrics.drafted_tokens == 0
