"""Settings of how tokens are chosen: what is refused and with what words, what a folder gives, what a model can't do
(K1, K2, K4, K5, K6, T2, cases C9 and C12)."""

import dataclasses

import numpy as np
import pytest

import jaxengine as je
from jaxengine.sampling_params import SamplingParams, resolve_sampling
from jaxengine.state import COLUMN_DTYPES
from jaxengine.toy import VOCAB, toy_model
from tests.jaxengine.harness import SMALL, assert_same, finish, leaves, tokens_of

MAPPING = "give a mapping from token ids to what is added to their logits"
FLOATS = {
    "temperature": (0.0, 3.4e38),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INTEGERS = {
    "top_k": (0, 2**63 - 1),
    "seed": (0, 2**32 - 1),
    "no_repeat_ngram_size": (0, 2**63 - 1),
    "min_new_tokens": (0, 2**63 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
OPEN = {"temperature", "top_k", "top_p", "do_sample", "seed", "repetition_penalty", "no_repeat_ngram_size"}
OPEN |= {"logprobs", "prompt_logprobs"}


def refused(error, words, **fields):
    with pytest.raises(error) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == words


@pytest.mark.parametrize(("name", "bounds"), FLOATS.items())
def test_K4_T2_numbers_have_bounds(name, bounds):
    low, high = bounds
    for value in (np.nextafter(low, -np.inf), np.nextafter(high, np.inf), np.inf, -np.inf, np.nan):
        value = float(value)
        words = f"SamplingParams.{name} is {value}; give a finite value from {low} to {high}"
        refused(ValueError, words, **{name: value})
    for value in ("1", True, np.bool_(True), 1j, [1.0], object):
        refused(TypeError, f"SamplingParams.{name} is {value!r}; give a number", **{name: value})
    for value in (low, high, np.float64(high), np.float32(1.0)):
        kept = getattr(SamplingParams(**{name: value}), name)
        assert (type(kept), kept) == (float, float(value))


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
def test_K4_T2_counts_have_bounds(name, bounds):
    low, high = bounds
    for value in (low - 1, high + 1):
        words = f"SamplingParams.{name} is {value}; give a value from {low} to {high}"
        refused(ValueError, words, **{name: value})
    for value in ("1", True, np.bool_(True), 1.0, [1], np.float32(1)):
        refused(TypeError, f"SamplingParams.{name} is {value!r}; give an integer", **{name: value})
    for value in (low, high, np.int64(7), np.uint8(7)):
        kept = getattr(SamplingParams(**{name: value}), name)
        assert (type(kept), kept) == (int, int(value))


ODD = [
    (TypeError, "do_sample", 1, "do_sample is 1; give True or False"),
    (TypeError, "ignore_eos", 0, "ignore_eos is 0; give True or False"),
    (TypeError, "ignore_eos", "no", "ignore_eos is 'no'; give True or False"),
    (ValueError, "logprobs_from", "engine", "logprobs_from is 'engine'; give one of 'model', 'sampling'"),
    (TypeError, "logprobs_from", ["model"], "logprobs_from is ['model']; give one of 'model', 'sampling'"),
    (TypeError, "logit_bias", [(1, 2.0)], f"logit_bias is [(1, 2.0)]; {MAPPING}"),
    (TypeError, "logit_bias", (1, 2), f"logit_bias is (1, 2); {MAPPING}"),
    (TypeError, "logit_bias", ((1,),), f"logit_bias is ((1,),); {MAPPING}"),
    (TypeError, "logit_bias", "12", f"logit_bias is '12'; {MAPPING}"),
    (ValueError, "logit_bias", ((1, 2.0), (1, 3.0)), "logit_bias names token 1 twice; give it one value"),
    (TypeError, "logit_bias", {"a": 1.0}, "a token of SamplingParams.logit_bias is 'a'; give an integer"),
    (TypeError, "logit_bias", {True: 1.0}, "a token of SamplingParams.logit_bias is True; give an integer"),
    (TypeError, "logit_bias", {3: "x"}, "logit_bias[3] is 'x'; give a number"),
    (
        ValueError,
        "logit_bias",
        {-1: 1.0},
        "a token of SamplingParams.logit_bias is -1; give a value from 0 to 2147483647",
    ),
    (
        ValueError,
        "logit_bias",
        {3: float("inf")},
        "logit_bias[3] is inf; give a finite value from -3.4e+38 to 3.4e+38",
    ),
    (
        ValueError,
        "logit_bias",
        {3: float("nan")},
        "logit_bias[3] is nan; give a finite value from -3.4e+38 to 3.4e+38",
    ),
    (TypeError, "stop_token_ids", 5, "stop_token_ids is 5; give a list of token ids"),
    (TypeError, "stop_token_ids", "5", "stop_token_ids is '5'; give a list of token ids"),
    (TypeError, "stop_token_ids", {5: 1}, "stop_token_ids is {5: 1}; give a list of token ids"),
    (
        TypeError,
        "stop_token_ids",
        np.array(5),
        "stop_token_ids is an array of 0 dimensions; give a list of token ids",
    ),
    (TypeError, "stop_token_ids", [1.0], "a token of SamplingParams.stop_token_ids is 1.0; give an integer"),
    (
        ValueError,
        "stop_token_ids",
        [-1],
        "a token of SamplingParams.stop_token_ids is -1; give a value from 0 to 2147483647",
    ),
    (TypeError, "stop", {"a"}, "stop is {'a'}; give a string or a list of strings"),
    (TypeError, "stop", b"a", "stop is b'a'; give a string or a list of strings"),
    (TypeError, "stop", ["a", 1], "stop[1] is 1; give a string"),
    (ValueError, "stop", "", "stop is empty and would match anywhere; give at least one character"),
    (ValueError, "stop", ["a", ""], "stop[1] is empty and would match anywhere; give at least one character"),
]


@pytest.mark.parametrize(("error", "name", "value", "words"), ODD)
def test_K4_K5_T2_other_values_are_refused_by_name(error, name, value, words):
    sentence = words if words.startswith("a token of") else f"SamplingParams.{words}"
    refused(error, sentence, **{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_T2_every_setting_is_checked_and_only_those_left_to_others_may_be_none(name):
    with pytest.raises((TypeError, ValueError), match=rf"SamplingParams\.{name} is "):
        SamplingParams(**{name: object()})
    if name in OPEN:
        assert SamplingParams(**{name: None}) == SamplingParams()
    else:
        with pytest.raises(TypeError, match=rf"SamplingParams\.{name} is None; give "):
            SamplingParams(**{name: None})


def test_A1_settings_are_hashable_values_whatever_they_were_given_as():
    biases, stops, ends = {9: 1, np.int32(2): np.float32(0.5)}, ["b", "a"], [5, 3, 5]
    made = SamplingParams(logit_bias=biases, stop=stops, stop_token_ids=ends)
    biases[1], _, _ = 2.0, stops.append("c"), ends.append(4)
    assert made.logit_bias == ((2, 0.5), (9, 1.0))
    assert made.stop == ("b", "a")
    assert made.stop_token_ids == (3, 5)
    same = SamplingParams(logit_bias=((2, 0.5), (9, 1.0)), stop=("b", "a"), stop_token_ids=iter([3, 5]))
    assert (same, hash(same), repr(same)) == (made, hash(made), repr(made))
    assert dataclasses.replace(made) == made
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop_token_ids=np.array([2, 1])).stop_token_ids == (1, 2)


def test_K2_K4_the_folder_gives_what_is_left_open():
    search = {"repetition_penalty": 1.25, "no_repeat_ngram_size": 3, "min_length": 9, "min_p": 0.5}
    found = resolve_sampling(SamplingParams(), search)
    assert (found.repetition_penalty, found.no_repeat_ngram_size, found.min_length) == (1.25, 3, 9)
    assert found.temperature == 0.0
    own = SamplingParams(repetition_penalty=1.0, no_repeat_ngram_size=0, temperature=0.5)
    found = resolve_sampling(own, search)
    assert (found.repetition_penalty, found.no_repeat_ngram_size, found.min_length) == (1.0, 0, 9)
    assert (found.temperature, found.min_p) == (0.5, 0.0)
    plain = resolve_sampling(SamplingParams(min_p=0.25), {})
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1.0, 0, 1.0, 0.25)
    assert (plain.repetition_penalty, plain.no_repeat_ngram_size, plain.min_length) == (1.0, 0, 0)


@pytest.mark.parametrize(
    ("search", "error", "words"),
    [
        ({"repetition_penalty": 0}, ValueError, "is 0.0; give a finite value from 1e-06"),
        ({"repetition_penalty": "1"}, TypeError, "is '1'; give a number"),
        ({"no_repeat_ngram_size": -1}, ValueError, "is -1; give a value from 0"),
        ({"no_repeat_ngram_size": 2.0}, TypeError, "is 2.0; give an integer"),
        ({"min_length": -1}, ValueError, "is -1; give a value from 0"),
        ({"min_length": "9"}, TypeError, "is '9'; give an integer"),
    ],
)
def test_K4_a_bad_value_of_the_folder_is_named(search, error, words):
    state = je.init_state(toy_model(search=search), SMALL)
    (name,) = search
    with pytest.raises(error, match=f"search.{name} of the model folder {words}"):
        je.create_request(state)


MODEL, TEXT = toy_model(), toy_model(text=True)
IMPOSSIBLE = [
    (MODEL, {"logit_bias": {1: 1.0, VOCAB: 1.0}}, "SamplingParams.logit_bias names token 32; the vocabulary"),
    (MODEL, {"stop_token_ids": [VOCAB]}, "SamplingParams.stop_token_ids names token 32; the vocabulary"),
    (MODEL, {"stop": "a"}, "SamplingParams.stop needs text, but this model has no tokenizer"),
]


@pytest.mark.parametrize(("model", "fields", "words"), IMPOSSIBLE)
def test_K1_K6_what_a_model_cannot_do_is_refused_at_either_call_and_changes_nothing(model, fields, words):
    sampling = SamplingParams(**fields)
    state = je.init_state(model, SMALL)
    before = leaves(state)
    with pytest.raises(ValueError, match=words):
        je.create_request(state, je.RequestOptions(sampling=sampling))
    assert_same(before, leaves(state))
    state, request_id = je.create_request(state)
    before = leaves(state)
    with pytest.raises(ValueError, match=words):
        je.begin_turn(state, request_id, [1], je.TurnOptions(2, sampling=sampling))
    assert_same(before, leaves(state))
    state, turn = je.begin_turn(state, request_id, [1], je.TurnOptions(2))
    assert turn == 1


def test_K1_the_last_id_of_the_vocabulary_is_one():
    sampling = SamplingParams(logit_bias={VOCAB - 1: 1.0}, stop_token_ids=[VOCAB - 1])
    state, _ = je.create_request(je.init_state(MODEL, SMALL), je.RequestOptions(sampling=sampling))
    assert len(state.control.requests) == 1


@pytest.mark.parametrize("name", sorted(INTEGERS.keys() - {"logprobs", "prompt_logprobs"}))
def test_K4_the_largest_value_of_a_setting_runs(name):
    """Settings go into columns of fixed width."""
    assert COLUMN_DTYPES["top_k"] is np.int32
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 3, name: INTEGERS[name][1]})
    state, request_id = je.create_request(je.init_state(MODEL, SMALL), je.RequestOptions(sampling=sampling))
    state, _ = je.begin_turn(state, request_id, [3, 1], je.TurnOptions(3))
    state, _ = finish(MODEL, state)
    assert len(tokens_of(state, request_id)) == 5


def test_K4_grammar_and_ignore_eos_exclude_each_other():
    state = je.init_state(toy_model(eos=[0], text=True), SMALL)
    options = je.RequestOptions(sampling=SamplingParams(ignore_eos=True), grammar=je.Grammar.regex("ab"))
    with pytest.raises(ValueError, match="a grammar ends with an EOS, and this turn has none"):
        je.create_request(state, options)
