"""Reported log-probabilities against plain log-softmax and the enumerated distribution (K1, case C4)."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import VOCAB, continuation, logits_after, toy_model
from tests.jaxengine.chosen import PROMPTS, SETTINGS, WIDE, Row, alone, distribution, edited, together
from tests.jaxengine.harness import SMALL

MODEL = toy_model()
TOKEN = je.EngineEventFlags.TOKEN


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def assert_reports(found, expected, token, count):
    """The chosen one's, then the likeliest in order, ties by id; what can't be is -inf."""
    np.testing.assert_allclose(found.chosen, expected[token], rtol=1e-5, atol=1e-5)
    best = sorted(range(VOCAB), key=lambda each: (-expected[each], each))[:count]
    assert [each for each, _ in found.top] == best
    np.testing.assert_allclose([value for _, value in found.top], expected[best], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_K1_model_logprobs_are_the_log_softmax_of_the_transactions_logits(count):
    """Whatever the settings make of them: a draw of warmth, penalties and biases change nothing."""
    sampling = je.SamplingParams(
        temperature=8.0, seed=3, top_k=5, logit_bias={4: 3.0}, presence_penalty=1.0, logprobs=count
    )
    state, request_id = je.create_request(je.init_state(MODEL, SMALL), je.RequestOptions(sampling=sampling))
    state, _ = je.begin_turn(state, request_id, [3, 1], je.TurnOptions(6))
    for _ in range(6):
        transaction = je.execute(MODEL, state, je.plan_step(state))
        (logits,) = np.asarray(transaction.logits)
        state, (event,) = je.commit(state, transaction)
        assert_reports(event.logprobs, log_softmax(logits), event.token, count)
        assert len(event.logprobs.top) == count


@given(prompt=PROMPTS, sampling=SETTINGS, count=st.integers(0, 20))
@settings(max_examples=25)
def test_K1_K2_logprobs_of_either_stage_are_those_of_the_oracle(prompt, sampling, count):
    sampling = dataclasses.replace(sampling, stop=(), stop_token_ids=(), logprobs=count)
    sequence, _, events = alone(MODEL, Row(prompt, sampling))
    for place, event in zip(range(len(prompt), len(sequence)), events, strict=True):
        assert event.token == sequence[place]
        prefix = sequence[:place]
        if sampling.logprobs_from == "model":
            expected = log_softmax(logits_after(prefix))
        else:
            greedy = sampling.temperature == 0 or sampling.top_k == 1
            plain = dataclasses.replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            logits = edited(prefix, len(prompt), sampling)
            with np.errstate(divide="ignore"):
                expected = np.log(distribution(logits, plain if greedy else sampling))
        if sampling.logprobs_from == "sampling" and (sampling.top_p < 1 or sampling.min_p > 0):
            # Where rounding decides what is kept, what is kept shows in the report.
            assert np.isfinite(event.logprobs.chosen)
            continue
        assert_reports(event.logprobs, expected, event.token, count)


def test_K1_a_greedy_rows_sampling_logprobs_take_temperature_1():
    sampling = je.SamplingParams(temperature=0.0, logprobs=20, logprobs_from="sampling", logit_bias={4: 0.5})
    sequence, _, events = alone(MODEL, Row([3, 1], sampling))
    for place, event in enumerate(events, 2):
        expected = log_softmax(edited(sequence[:place], 2, sampling))
        assert_reports(event.logprobs, expected, event.token, 20)


@pytest.mark.parametrize("stage", ["model", "sampling"])
def test_case_C4_with_drafts_each_token_has_the_logprobs_that_it_has_without(stage):
    """Drafts that are right, then one that is not; the turn ends at its limit behind accepted ones."""
    sampling = je.SamplingParams(
        temperature=0.0, logprobs=5, logprobs_from=stage, frequency_penalty=0.25, repetition_penalty=1.25
    )
    row = Row([3, 1], sampling, 12)
    sequence, _, plain = alone(MODEL, row)
    generated = sequence[2:]
    proposals = {n: [*generated[3 * n - 2 : 3 * n], 27] for n in (1, 2, 3)}
    ((_, _, drafted),) = together(MODEL, [row], WIDE, drafts=proposals)
    assert drafted == plain


def test_case_C4_a_turns_end_has_no_logprobs_of_its_own():
    tokens = continuation([3, 1], 2)
    sampling = je.SamplingParams(logprobs=2)
    _, _, events = alone(toy_model(eos=[tokens[1]]), Row([3, 1], sampling))
    assert [bool(event.flags & TOKEN) for event in events] == [True, False]
    assert [event.logprobs is not None for event in events] == [True, False]


def test_K1_rows_that_ask_for_none_get_none_beside_those_that_do():
    rows = [Row([3, 1], je.SamplingParams(logprobs=count), 3) for count in (None, 0, 2, 20)]
    found = together(MODEL, rows)
    counts = [[None if e.logprobs is None else len(e.logprobs.top) for e in events] for *_, events in found]
    assert counts == [[None] * 3, [0] * 3, [2] * 3, [20] * 3]
