"""Penalties, bias and masks by hand-made rows, and rows that leave nothing to choose from (K2, K4, cases C9, C10 and
C13). Generated rows are in test_sampling_rules.py."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine import sampling
from tests.jaxengine.drawing import Row, edits_of, logits_of, settings_of

choose = jax.jit(sampling.choose, static_argnames=("known_ids", "top"))
VOCAB = 128
GREEDY = {"temperature": 0.0}


def logits_with(**named):
    """Zeros but for the ids of keywords like `id5`."""
    logits = np.zeros(VOCAB, np.float32)
    for name, value in named.items():
        logits[int(name[2:])] = value
    return logits


def chosen(rows, known_ids=VOCAB, top=None, **padding):
    flags = np.ones(len(rows), bool)
    return choose(
        logits_of(rows),
        settings_of(rows),
        edits_of(rows, **padding),
        known_ids=known_ids,
        top=top,
        processed=flags,
    )


def edited_logits(row):
    """float64[vocab], over the logit of id 0, which is 0: at temperature 1, differences of logprobs are those."""
    choice = chosen([row, row], top=VOCAB)
    result = np.empty(VOCAB)
    result[np.asarray(choice.logprobs.ids)[0]] = np.asarray(choice.logprobs.values, np.float64)[0]
    return result - result[0]


def expect(row, **named):
    np.testing.assert_allclose(edited_logits(row), logits_with(**named), atol=2e-6)


def test_K2_repetition_divides_positive_logits_and_multiplies_others_over_prompt_and_output():
    logits = logits_with(id1=3, id2=-2, id3=1, id4=3)
    row = Row(logits, repetition=2.0, history=(1, 1, 2, 3), output_from=3)
    expect(row, id1=1.5, id2=-4, id3=0.5, id4=3)


def test_K2_presence_and_frequency_count_the_turns_output_alone():
    logits = logits_with(id1=3, id2=3, id3=3)
    prompt_and_output = {"history": (1, 2, 2, 3, 2), "output_from": 2}
    expect(Row(logits, presence=0.5, **prompt_and_output), id1=3, id2=2.5, id3=2.5)
    expect(Row(logits, frequency=0.5, **prompt_and_output), id1=3, id2=2, id3=2.5)
    expect(Row(logits, presence=1.0, frequency=-0.5, **prompt_and_output), id1=3, id2=3, id3=2.5)
    expect(Row(logits, presence=1.0, frequency=1.0, history=(1, 2), output_from=2), id1=3, id2=3, id3=3)


def test_K2_repetition_comes_before_presence_and_that_before_bias():
    row = Row(
        logits_with(id1=4, id2=0.25),
        repetition=2.0,
        presence=1.0,
        history=(1, 2),
        bias=((2, 1.5), (5, -3.0)),
    )
    expect(row, id1=1, id2=0.625, id5=-3)


def test_K2_padding_touches_no_id():
    """-1 would be the last id, were it taken for an index."""
    row = Row(logits_with(id127=2), repetition=2.0, presence=1.0, history=(1,), output_from=0)
    expect(row, id1=-1, id127=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_K2_a_masked_id_stays_masked_whatever_the_bias(temperature):
    rows = [
        Row(
            logits_with(id7=50, id9=20),
            temperature=temperature,
            masked=(7,),
            bias=((7, 1e9),),
            position=i,
        )
        for i in range(16)
    ]
    assert set(np.asarray(chosen(rows).tokens).tolist()) == {9}


def test_case_C9_a_mask_of_every_end_id_leaves_the_next_best_and_a_mask_of_all_is_reported():
    logits = logits_with(id1=9, id2=8, id3=7)
    rows = [
        Row(logits, **GREEDY),
        Row(logits, masked=(1,), **GREEDY),
        Row(logits, masked=(1, 2), **GREEDY),
        Row(logits, masked=tuple(range(VOCAB)), **GREEDY),
        Row(logits, masked=tuple(range(VOCAB)), temperature=0.7),
    ]
    choice = chosen(rows)
    assert np.asarray(choice.tokens)[:3].tolist() == [1, 2, 3]
    assert np.asarray(choice.usable).tolist() == [True, True, True, False, False]
    assert ((np.asarray(choice.tokens) >= 0) & (np.asarray(choice.tokens) < VOCAB)).all()


UNKNOWN = [
    {},
    {"temperature": 0.0},
    {"top_k": 2},
    {"top_k": 200, "top_p": 0.99},
    {"min_p": 0.5},
    {"bias": ((110, 5.0),)},
    {"masked": (3,), "repetition": 1.5, "history": (110, 4)},
    {"temperature": 0.0, "bias": ((110, 5.0), (4, 1.0))},
]


@pytest.mark.parametrize("edits", ["without edits", "with edits"])
def test_case_C10_ids_beyond_the_tokenizer_are_never_chosen(edits):
    """Logits 128 wide, a tokenizer of 100, the largest logit at id 110, which every mask allows."""
    rows = [
        Row(logits_with(id110=30, id4=2), position=position, **dict({"temperature": 5.0}, **row))
        for row in UNKNOWN
        for position in range(32)
    ]
    if edits == "with edits":
        choice = chosen(rows, known_ids=100)
    else:
        choice = choose(logits_of(rows), settings_of(rows), known_ids=100)
    tokens = np.asarray(choice.tokens).reshape(len(UNKNOWN), -1)
    assert np.asarray(choice.usable).all()
    assert (tokens >= 0).all()
    assert (tokens < 100).all()
    assert set(tokens[1]) == {4}


def test_case_C10_a_row_of_which_only_unknown_ids_are_finite_is_unusable():
    logits = np.where(np.arange(VOCAB) < 100, -np.inf, 1.0)
    rows = [Row(logits), Row(logits, **GREEDY)]
    assert not np.asarray(chosen(rows, known_ids=100).usable).any()
    assert np.asarray(chosen(rows, known_ids=101).tokens).tolist() == [100, 100]


BROKEN = {
    "one NaN": logits_with(id5=np.nan, id6=3),
    "a NaN that is masked": logits_with(id9=np.nan, id6=3),
    "a NaN at an unknown id": logits_with(id120=np.nan, id6=3),
    "all NaN": np.full(VOCAB, np.nan),
    "all -inf": np.full(VOCAB, -np.inf),
    "an infinity": logits_with(id5=np.inf),
}


@given(
    name=st.sampled_from(sorted(BROKEN)),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 100.0]),
    place=st.integers(0, 3),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=40)
def test_case_C13_a_row_of_nan_or_infinities_is_alone_unusable(name, temperature, place, top_k, top_p):
    rows = [
        Row(logits_with(id3=5, id4=-np.inf), temperature=t, masked=(9,), seed=i)
        for i, t in enumerate((0.0, 1e-6, 0.7, 100.0))
    ]
    before = chosen(rows, known_ids=100)
    rows[place] = Row(BROKEN[name], temperature=temperature, top_k=top_k, top_p=top_p, masked=(9,))
    after = chosen(rows, known_ids=100)
    others = np.arange(4) != place
    assert np.asarray(before.usable).all()
    assert np.asarray(after.usable).tolist() == others.tolist()
    assert (np.asarray(after.tokens) == np.asarray(before.tokens))[others].all()
    assert 0 <= np.asarray(after.tokens)[place] < VOCAB


def test_case_C13_a_tiny_temperature_and_top_k_1_are_arg_max():
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    forms = [
        GREEDY,
        {"temperature": 1e-6},
        {"temperature": 1e-38},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ]
    rows = [Row(logits, position=position, **form) for form in forms for position in range(8)]
    assert set(np.asarray(chosen(rows).tokens).tolist()) == {int(logits.argmax())}
