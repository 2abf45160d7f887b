"""Logprobs of the chosen and of the likeliest ids, from the model's own logits or from what was drawn from (K1)."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings

from jaxengine import sampling
from tests.jaxengine.drawing import Row, distribution, edits_of, logits_of, ranked, settings_of

choose = jax.jit(sampling.choose, static_argnames=("known_ids", "top"))
VOCAB, KNOWN, TOP, ROWS = 70, 67, 6, 3
LEVELS = st.sampled_from([-np.inf, -30.0, -1.0, -0.0, 0.0, 0.5, 2.0, 2.25, 40.0])
LOGITS = st.lists(LEVELS, min_size=VOCAB, max_size=VOCAB).map(lambda values: np.array([*values[:-1], 1.0]))
ROW = st.builds(
    Row,
    logits=LOGITS,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 0.83]),
    min_p=st.sampled_from([0.0, 0.013]),
    presence=st.sampled_from([0.0, 0.5]),
    history=st.just((1, 2, 3)),
    bias=st.sampled_from([(), ((0, 1.0), (66, 2.0))]),
    masked=st.sampled_from([(), (4, 5)]),
    seed=st.integers(0, 2**32 - 1),
)


@given(
    rows=st.lists(ROW, min_size=ROWS, max_size=ROWS),
    processed=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
@settings(max_examples=60)
def test_K1_logprobs_are_of_the_stage_that_was_named(rows, processed):
    choice = choose(
        logits_of(rows),
        settings_of(rows),
        edits_of(rows),
        known_ids=KNOWN,
        top=TOP,
        processed=np.array(processed),
    )
    for i, row in enumerate(rows):
        if not choice.usable[i]:
            continue
        if processed[i]:
            with np.errstate(divide="ignore"):
                expected = np.log(distribution(row, KNOWN))
            order = ranked(np.where(expected > -np.inf, expected, -np.inf))[:TOP]
        else:
            expected = scipy.special.log_softmax(row.logits.astype(np.float64))
            order = ranked(row.logits)[:TOP]
        token = int(choice.tokens[i])
        assert np.asarray(choice.logprobs.ids[i]).tolist() == order
        np.testing.assert_allclose(choice.logprobs.values[i], expected[order], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(choice.logprobs.chosen[i], expected[token], rtol=1e-5, atol=1e-5)


def plain(logits, top, **settings_of_row):
    rows = [Row(np.array(logits), **settings_of_row)] * 2
    return choose(logits_of(rows), settings_of(rows), known_ids=len(logits), top=top)


def test_K1_none_and_0_ask_for_none_and_for_the_chosen_one():
    assert plain([1.0, 2.0, 0.0, 0.0], None).logprobs is None
    logprobs = plain([1.0, 2.0, 0.0, 0.0], 0, temperature=0.0).logprobs
    assert logprobs.ids.shape == logprobs.values.shape == (2, 0)
    expected = scipy.special.log_softmax([1.0, 2.0, 0.0, 0.0])[1]
    np.testing.assert_allclose(logprobs.chosen, [expected] * 2, rtol=1e-6)


def test_K4_the_likeliest_tie_by_lowest_id_and_0_ties_with_its_negative():
    assert np.asarray(plain([-0.0, 1.0, 0.0, 1.0, -0.0, 1.0], 5).logprobs.ids[0]).tolist() == [1, 3, 5, 0, 2]


def test_K1_ids_that_differ_by_less_than_logprobs_show_stay_in_order():
    """Far below the best, neighbours round to one logprob; the better one is still named first."""
    small = np.float32(1e-6)
    choice = plain([100.0, small, np.nextafter(small, np.float32(1)), 0.0], 4)
    assert np.asarray(choice.logprobs.ids[0]).tolist() == [0, 2, 1, 3]
    assert choice.logprobs.values[0, 1] == choice.logprobs.values[0, 2]


@pytest.mark.parametrize("flags", [None, np.zeros(2, bool)])
def test_K1_a_greedy_rows_own_logprobs_ignore_filters_and_edits(flags):
    rows = [Row(np.array([1.0, 3.0, 2.0]), temperature=0.0, bias=((0, 9.0),), masked=(1,))] * 2
    choice = choose(logits_of(rows), settings_of(rows), edits_of(rows), known_ids=3, top=3, processed=flags)
    assert np.asarray(choice.tokens).tolist() == [0, 0]
    assert np.asarray(choice.logprobs.ids[0]).tolist() == [1, 2, 0]
    expected = scipy.special.log_softmax([1.0, 3.0, 2.0])
    np.testing.assert_allclose(choice.logprobs.values[0], expected[[1, 2, 0]], rtol=1e-6)
    np.testing.assert_allclose(choice.logprobs.chosen, [expected[0]] * 2, rtol=1e-6)
