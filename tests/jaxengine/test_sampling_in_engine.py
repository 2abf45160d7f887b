"""Sampling settings in the engine: the order in which they act, rows of all kinds in one batch, and settings of a turn
(K1, K2, K3, K4, K6, cases C9, C10 and C13)."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings

import jaxengine as je
from jaxengine.choosing import repeating
from jaxengine.text import Tokenizer
from jaxengine.toy import LETTERS, logits_after, next_token, toy_model
from tests.jaxengine.chosen import (
    PROMPTS,
    SETTINGS,
    WIDE,
    Row,
    alone,
    begin,
    distribution,
    edited,
    outcome,
    repeated,
    together,
)
from tests.jaxengine.harness import SMALL, finish, tokens_of

Reason, Stage = je.FinishReason, je.Stage
EOS = (2, 1)
MODEL, TEXT = toy_model(eos=EOS), toy_model(eos=EOS, text=True)
GREEDY = je.SamplingParams(temperature=0.0)


def choices(row, found):
    """Each choice with the sequence before it; an EOS or a stop id is the choice that isn't there, None."""
    sequence, _, events = found
    for place in range(len(row.prompt), len(sequence)):
        yield sequence[:place], sequence[place]
    if events[-1].finish_reason == Reason.EOS:
        yield sequence, None


@given(prompt=PROMPTS, sampling=SETTINGS)
@settings(max_examples=60)
def test_K2_K4_each_choice_is_the_oracles(prompt, sampling):
    row = Row(prompt, dataclasses.replace(sampling, stop=()))
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
    found = alone(MODEL, row)
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    for prefix, token in choices(row, found):
        logits = edited(prefix, len(prompt), sampling, EOS)
        if greedy:
            best = int(np.argmax(logits))
            assert best == token if token is not None else best in ends
        else:
            possible = distribution(logits, sampling, slack=1e-4) > 0
            assert possible[token] if token is not None else possible[list(ends)].any()
    assert found[2][-1].finish_reason in (Reason.EOS, Reason.MAX_GENERATED_TOKENS)


@given(tokens=st.lists(st.integers(0, 2), max_size=20), size=st.integers(1, 6))
def test_K2_what_would_repeat_is_what_a_search_by_hand_finds(tokens, size):
    found = repeating(np.array(tokens, np.int32), size)
    assert set(found.tolist()) == repeated(tokens, size)


ROWS = st.lists(
    st.builds(Row, prompt=PROMPTS, sampling=SETTINGS, limit=st.integers(1, 8)), min_size=2, max_size=16
)


@given(
    rows=ROWS,
    arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=16),
    chunk=st.sampled_from([None, 3]),
    blocks=st.sampled_from([8, 64]),
    dropped=st.sets(st.integers(0, 20), max_size=4),
    faults=st.dictionaries(st.integers(0, 20), st.sampled_from(list(Stage)[:-1]), max_size=4),
)
@settings(max_examples=12)
@pytest.mark.slow
def test_K1_K3_a_row_in_any_company_is_what_it_is_alone(rows, arrivals, chunk, blocks, dropped, faults):
    """Tokens, what is committed, texts, stops and the bits of logprobs: for any order of arrival, chunks, a pool that
    makes rows lose their places, steps run in vain and steps that fail."""
    config = dataclasses.replace(WIDE, chunk_size=chunk, num_blocks=blocks)
    found = together(TEXT, rows, config, arrivals=arrivals, dropped=dropped, faults=faults)
    for row, got in zip(rows, found, strict=True):
        assert got == alone(TEXT, row)


@given(rows=st.lists(st.builds(Row, prompt=PROMPTS, sampling=SETTINGS), min_size=2, max_size=4))
@settings(max_examples=6)
@pytest.mark.slow
def test_K1_K3_a_row_of_a_static_batch_is_what_it_is_alone(rows):
    config = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=32, batching="static")
    for row, got in zip(rows, together(TEXT, rows, config), strict=True):
        assert got == alone(TEXT, row)


@given(
    rows=st.lists(st.builds(Row, prompt=PROMPTS, sampling=SETTINGS), min_size=1, max_size=4),
    drafts=st.dictionaries(st.integers(1, 8), st.lists(st.integers(0, LETTERS - 1), max_size=3), max_size=6),
    right=st.booleans(),
)
@settings(max_examples=10)
@pytest.mark.slow
def test_K1_case_C4_drafts_change_no_row(rows, drafts, right):
    """Right drafts are those that the first row says, which the others mostly don't."""
    plain = [alone(TEXT, row) for row in rows]
    if right:
        generated = plain[0][0][len(rows[0].prompt) :]
        drafts = {n: generated[2 * n - 1 : 2 * n + 1] for n in range(1, 5)}
    found = together(TEXT, rows, drafts=drafts)
    assert found == plain


def test_case_C9_a_minimum_holds_off_every_end_and_ignoring_eos_keeps_stop_ids():
    """Biases make both EOS and a stop id the likeliest tokens by far, one after the other."""
    bias = {1: 90.0, 2: 80.0, 5: 70.0}
    for least in (0, 1, 3):
        sampling = je.SamplingParams(logit_bias=bias, min_new_tokens=least, stop_token_ids=[5])
        tokens, processed, events = alone(MODEL, Row([3, 4], sampling))
        assert (len(tokens), processed) == (2 + least, 2 + least)
        assert not {1, 2, 5} & set(tokens)
        assert events[-1].finish_reason == Reason.EOS
        assert events[-1].flags == je.EngineEventFlags.TURN_FINISHED
        assert events[-1].usage == je.Usage(2, least)
        ignoring = dataclasses.replace(sampling, ignore_eos=True)
        tokens, _, events = alone(MODEL, Row([3, 4], ignoring))
        assert 5 not in tokens
        assert tokens[2 + least :] == [1] * (8 - least)
        assert events[-1].finish_reason == Reason.MAX_GENERATED_TOKENS
    stopping = je.SamplingParams(logit_bias={5: 90.0}, stop_token_ids=[5], ignore_eos=True)
    tokens, _, events = alone(MODEL, Row([3, 4], stopping))
    assert (tokens, events[-1].finish_reason) == ([3, 4], Reason.EOS)


def test_case_C9_the_folders_minimum_counts_the_prompt():
    model = toy_model(eos=EOS, search={"min_length": 6})
    sampling = je.SamplingParams(logit_bias={1: 90.0})
    for prompt, generated in (([3, 4], 4), ([3] * 5, 1), ([3] * 6, 0), ([3] * 9, 0)):
        tokens, _, events = alone(model, Row(prompt, sampling))
        assert len(tokens) - len(prompt) == events[-1].usage.generated_tokens == generated


def test_case_C9_masks_that_leave_nothing_end_that_turn_alone_with_a_sentence():
    sampling = je.SamplingParams(stop_token_ids=range(LETTERS), min_new_tokens=3)
    with je.Engine(MODEL, dataclasses.replace(SMALL, failure_policy="isolate")) as engine:
        lost, other = engine.create_request(je.RequestOptions(sampling=sampling)), engine.create_request()
        lost.begin_turn([3, 4], je.TurnOptions(2))
        other.begin_turn([3, 4], je.TurnOptions(2))
        ends = {}
        while engine.has_pending_requests():
            for event in engine.run():
                if event.finish_reason:
                    ends[event.request] = event
        assert ends[lost].finish_reason == Reason.FAILED
        assert "leave no token" in ends[lost].detail
        assert ends[other].finish_reason == Reason.MAX_GENERATED_TOKENS


def test_K2_a_masked_id_stays_masked_whatever_its_bias():
    sampling = je.SamplingParams(logit_bias={30: 1e30, 9: 50.0}, no_repeat_ngram_size=1)
    tokens, _, _ = alone(MODEL, Row([3, 4], sampling))
    assert tokens.count(9) == 1
    assert max(tokens) < LETTERS
    assert np.isneginf(logits_after([3])[30])


def narrow(letters):
    """The toy whose tokenizer knows the first letters only, the last of them the EOS; its logits stay as wide."""
    vocab = {chr(ord("a") + token): token for token in range(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return dataclasses.replace(toy_model(eos=[letters - 1]), read_tokenizer=lambda: Tokenizer(backend))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("grammar", [None, je.Grammar.regex("[a-i]{1,6}")])
def test_case_C10_ids_without_a_token_are_never_chosen(temperature, top_k, grammar):
    """Their logits are the highest by far, and the model's own logprobs say so."""
    sampling = je.SamplingParams(
        temperature=temperature, top_k=top_k, seed=1, logit_bias={20: 1e30, 12: 1e30}, logprobs=20
    )
    model = narrow(10)
    options = je.RequestOptions(sampling=sampling, grammar=grammar)
    state, request_id = je.create_request(je.init_state(model, SMALL), options)
    state, _ = je.begin_turn(state, request_id, [1], je.TurnOptions(6))
    state, events = finish(model, state)
    tokens = tokens_of(state, request_id)
    assert max(tokens) < 10
    assert events[-1].finish_reason in (Reason.EOS, Reason.MAX_GENERATED_TOKENS)
    assert "".join(event.text for event in events) == "".join("abcdefghi"[token] for token in tokens[1:])


WARM = je.SamplingParams(temperature=4.0, seed=11)


def served(turns, own=WARM, model=MODEL):
    """The tokens that each turn generated; a turn is a prompt and its settings, or None for the request's."""
    state, request_id = je.create_request(je.init_state(model, SMALL), je.RequestOptions(sampling=own))
    generated = []
    for prompt, sampling in turns:
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(5, sampling=sampling))
        begun = len(tokens_of(state, request_id))
        state, _ = finish(model, state)
        generated.append(tokens_of(state, request_id)[begun:])
    return generated


IGNORING = dataclasses.replace(WARM, ignore_eos=True)


def test_K6_a_turns_settings_hold_for_that_turn_and_the_stream_goes_on_by_position():
    plain = served([([3], None), ([4], None), ([5], None)], IGNORING)
    greedy = dataclasses.replace(GREEDY, ignore_eos=True)
    mixed = served([([3], None), ([4], greedy), ([5], None)], IGNORING)
    assert mixed[0] == plain[0]
    before = [3, *plain[0], 4]
    for token in mixed[1]:
        assert token == next_token(before)
        before.append(token)
    # Settings that say the same as the request's give the same, a seed that is left open included.
    open_seed = dataclasses.replace(IGNORING, seed=None)
    assert served([([3], open_seed), ([4], IGNORING), ([5], open_seed)], IGNORING) == plain
    other = served([([3], None), ([4], dataclasses.replace(IGNORING, seed=12)), ([5], None)], IGNORING)
    assert other[0] == plain[0]
    assert other[1] != plain[1]


def test_K6_a_turns_settings_replace_the_requests_as_a_whole():
    own = je.SamplingParams(logit_bias={7: 99.0}, stop_token_ids=[9], min_new_tokens=1)
    turns = served([([3], None), ([4], je.SamplingParams(logit_bias={9: 99.0})), ([5], None)], own)
    assert turns == [[7] * 5, [9] * 5, [7] * 5]


def test_K6_settings_are_snapshots():
    bias = {7: 99.0}
    sampling = je.SamplingParams(logit_bias=bias)
    state, request_id = begin(je.init_state(MODEL, SMALL), Row([3], sampling))
    object.__setattr__(sampling, "logit_bias", ((8, 99.0),))
    bias[9] = 999.0
    state, events = finish(MODEL, state)
    assert outcome(state, request_id, events)[0] == [3, *[7] * 8]


def test_K1_case_C13_penalties_count_this_turns_output_only():
    """A presence penalty that outweighs everything: tokens of a turn differ, those of the next may come again."""
    sampling = je.SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, ignore_eos=True)
    turns = served([([3], None), ([4], None)], sampling)
    sequence = [3]
    for nth, prompt in enumerate(([], [4])):
        sequence += prompt
        start = len(sequence)
        for token in turns[nth]:
            assert token == np.argmax(edited(sequence, start, sampling))
            sequence.append(token)
