"""Drafts from a request's own text (M6)."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import jaxengine as je
from jaxengine.proposers import propose
from jaxengine.toy import toy_model
from tests.jaxengine.harness import SMALL

MODEL = toy_model()


@given(
    tokens=st.lists(st.integers(0, 2), max_size=14),
    most=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    room=st.integers(0, 8),
)
def test_M6_proposes_what_followed_the_newest_place_of_the_longest_run(tokens, most, sizes, room):
    shortest, longest = sizes
    expected = ()
    for size in range(longest, shortest - 1, -1):
        places = [
            i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[len(tokens) - size :]
        ]
        if places:
            grown = list(tokens)
            for _ in range(most):
                grown.append(grown[places[-1] + size + len(grown) - len(tokens)])
            expected = tuple(grown[len(tokens) :])
            break
    proposer = je.NgramDrafts(most=most, longest=longest, shortest=shortest)
    assert propose(proposer, np.array(tokens, np.int32), room) == expected[:room]


def test_M6_what_repeats_itself_follows_again():
    tokens = np.array([9, 1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    assert propose(je.NgramDrafts(most=2), tokens, 9) == (4, 5)
    assert propose(je.NgramDrafts(most=8), tokens, 9) == (4, 5, 1, 2, 3, 4, 5, 1)
    assert propose(je.NgramDrafts(shortest=4), tokens, 9) == ()
    assert propose(je.NgramDrafts(most=3), np.array([7, 7, 7], np.int32), 9) == (7, 7, 7)


def test_M6_however_many_are_asked_for_only_those_with_room_are_made():
    tokens = np.array([9, 1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    assert propose(je.NgramDrafts(most=2**31 - 1), tokens, 3) == (4, 5, 1)


@pytest.mark.parametrize(
    "values", [{"most": 0}, {"longest": 0}, {"shortest": 0}, {"longest": 2, "shortest": 3}]
)
def test_M6_refuses_settings_out_of_range(values):
    with pytest.raises(ValueError, match="NgramDrafts"):
        je.NgramDrafts(**values)


@pytest.mark.parametrize("values", [{"most": 1.5}, {"longest": "4"}, {"shortest": True}, {"most": None}])
def test_M6_refuses_settings_that_are_no_integers(values):
    with pytest.raises(TypeError, match="NgramDrafts"):
        je.NgramDrafts(**values)


def test_M6_a_proposer_is_no_other_thing():
    with pytest.raises(TypeError, match=r"RequestOptions.proposer is 3; give an NgramDrafts"):
        je.RequestOptions(proposer=3)


def served(proposer, sampling, limit=24):
    """One turn's events, and the engine's metrics."""
    engine = je.Engine(MODEL, SMALL)
    request = engine.create_request(je.RequestOptions(sampling=sampling, proposer=proposer))
    request.begin_turn([4, 4, 4], je.TurnOptions(limit))
    events = []
    while engine.has_pending_requests():
        events += engine.run()
    told = [(e.token, e.flags, e.finish_reason, e.usage) for e in events]
    return told, engine.metrics


@pytest.mark.parametrize(
    "sampling",
    [
        je.SamplingParams(temperature=0.0, logit_bias={9: 100.0}),
        je.SamplingParams(temperature=0.5, logit_bias={9: 50.0}, seed=3),
    ],
    ids=["greedy", "sampled"],
)
def test_M6_text_that_repeats_itself_takes_at_most_half_the_steps(sampling):
    plain, alone = served(None, sampling)
    drafted, metrics = served(je.NgramDrafts(), sampling)
    assert drafted == plain
    assert (alone.steps, alone.drafted_tokens, alone.accepted_drafts) == (24, 0, 0)
    assert metrics.steps <= 12
    assert metrics.accepted_drafts == 24 - metrics.steps
    assert metrics.drafted_tokens >= metrics.accepted_drafts


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.2, 1.0]),
    most=st.integers(1, 20),
    limit=st.integers(1, 12),
)
def test_M6_M2_a_proposer_changes_no_event(seed, temperature, most, limit):
    """Biases make few tokens likely, so that runs come again and proposals are right and wrong."""
    biases = {3: 30.0, 5: 30.0}
    sampling = je.SamplingParams(temperature=4 * temperature, seed=seed, logit_bias=biases)
    plain, _ = served(None, sampling, limit)
    drafted, metrics = served(je.NgramDrafts(most=most, longest=3, shortest=1), sampling, limit)
    assert drafted == plain
    assert metrics.accepted_drafts <= metrics.drafted_tokens
