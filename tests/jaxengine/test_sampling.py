"""Choosing tokens in an engine: streams that depend on nothing but seed and position, and settings (K3, K4, cases C12
and C13)."""

import dataclasses
import inspect
import warnings

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.sampling import SamplingRows, choose
from jaxengine.sampling_params import resolve_sampling
from jaxengine.toy import LETTERS, VOCAB, logits_after, next_token, toy_model
from tests.jaxengine.harness import SMALL, begun, finish, tokens_of


@jax.jit
def sampled(logits, rows):
    return choose(logits, rows, known_ids=logits.shape[1]).tokens


def test_K4_a_tie_goes_to_the_lowest_id():
    logits = np.array([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]], np.float32)
    types = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
    rows = SamplingRows(*(np.zeros(2, kind) for kind in types))
    assert np.asarray(sampled(logits, rows)).tolist() == [1, 0]


def test_case_C13_one_batch_of_temperatures_0_1e_6_07_and_100():
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    temperatures = [0.0, 1e-6, 0.7, 100.0]
    answers = [
        sampled_alone(prompt, je.SamplingParams(temperature=t, seed=5), count=12)
        for prompt, t in zip(prompts, temperatures, strict=True)
    ]
    state = je.init_state(MODEL, SMALL)
    for prompt, temperature in zip(prompts, temperatures, strict=True):
        sampling = je.SamplingParams(temperature=temperature, seed=5)
        state, request_id = je.create_request(state, je.RequestOptions(sampling=sampling))
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(12))
    state, _ = finish(MODEL, state)
    together = [tokens_of(state, request_id) for request_id in (1, 2, 3, 4)]
    assert together == answers
    for request in range(2):
        sequence = together[request]
        assert all(sequence[i] == next_token(sequence[:i]) for i in range(3, 15))
    assert all(0 <= token < LETTERS for sequence in together for token in sequence)
    assert len(set(together[3][3:])) > 3


# K3: streams

MODEL = toy_model()
WARM = je.SamplingParams(temperature=3.0, top_k=20, top_p=0.95, seed=11)


def sampled_alone(prompt, sampling, count=20):
    state, request_id = je.create_request(je.init_state(MODEL, SMALL), je.RequestOptions(sampling=sampling))
    state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(count))
    state, _ = finish(MODEL, state)
    return tokens_of(state, request_id)


def test_K3_a_token_is_drawn_from_the_logits_of_its_prefix_by_seed_and_position_alone():
    sequence = sampled_alone([1, 2, 3], WARM)
    greedy = 0
    for position in range(3, 23):
        rows = SamplingRows(
            np.full(2, 3.0, np.float32),
            np.full(2, 20, np.int32),
            np.full(2, 0.95, np.float32),
            np.zeros(2, np.float32),
            np.full(2, 11, np.uint32),
            np.full(2, position, np.int32),
        )
        logits = np.tile(logits_after(sequence[:position]).astype(np.float32), (2, 1))
        assert np.asarray(sampled(logits, rows)).tolist() == [sequence[position]] * 2
        greedy += sequence[position] == next_token(sequence[:position])
    assert greedy < 15


PROMPT = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=18)


@given(
    prompts=st.lists(PROMPT, min_size=2, max_size=4),
    mine=st.integers(0, 3),
    late=st.integers(0, 4),
    chunk=st.integers(1, 16),
    dropped=st.sets(st.integers(0, 12)),
)
@settings(max_examples=25)
def test_K3_batch_order_membership_chunks_and_dropped_steps_do_not_change_a_stream(
    prompts, mine, late, chunk, dropped
):
    mine %= len(prompts)
    prompt = [1, 2, 3, 4, 5]
    alone = sampled_alone(prompt, WARM, count=8)
    state = je.init_state(MODEL, dataclasses.replace(SMALL, chunk_size=chunk))
    for number, other in enumerate(prompts[:-1]):
        sampling = je.SamplingParams(temperature=0.5 * number, seed=11)
        state, request_id = je.create_request(state, je.RequestOptions(sampling=sampling))
        state, _ = je.begin_turn(state, request_id, other, je.TurnOptions(3 + number))
    for _ in range(late):
        state, _ = je.step(MODEL, state)
    state, request_id = je.create_request(state, je.RequestOptions(sampling=WARM))
    state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(8))
    for number in range(60):
        plan = je.plan_step(state)
        if plan.outcome == je.StepOutcome.CAPACITY_DEFERRED:
            state = je.close_request(state, int(state.control.requests.id[0]))
            continue
        if plan.outcome == je.StepOutcome.NO_WORK:
            break
        transaction = je.execute(MODEL, state, plan)
        if number not in dropped:
            state, _ = je.commit(state, transaction)
    assert tokens_of(state, request_id) == alone


def test_K3_the_seed_makes_the_stream_and_without_one_the_request_id_does():
    streams = {tuple(sampled_alone([1], dataclasses.replace(WARM, seed=seed))) for seed in range(8)}
    assert len(streams) == 8
    unseeded = dataclasses.replace(WARM, seed=None)
    assert sampled_alone([1], unseeded) == sampled_alone([1], dataclasses.replace(WARM, seed=1))


def test_K3_the_stream_goes_on_by_position_over_turns():
    state, request_id = je.create_request(je.init_state(MODEL, SMALL), je.RequestOptions(sampling=WARM))
    for prompt, count in (([1, 2], 3), ([3], 4)):
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(count))
        state, _ = finish(MODEL, state)
    sequence = tokens_of(state, request_id)
    assert sampled_alone(sequence[:6], WARM, count=4) == sequence


# K4: settings

GREEDY = je.SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    "params",
    [
        je.SamplingParams(),
        GREEDY,
        je.SamplingParams(temperature=1e-6),
        je.SamplingParams(temperature=5.0, do_sample=False),
        je.SamplingParams(temperature=5.0, top_k=1),
        je.SamplingParams(temperature=5.0, top_p=0.0),
        je.SamplingParams(do_sample=True, temperature=0.0),
    ],
)
def test_K4_case_C12_every_greedy_form_is_one(params):
    assert resolve_sampling(params, {}).temperature == 0.0
    assert sampled_alone([3, 4], params) == sampled_alone([3, 4], GREEDY)


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 1, 10**9])
def test_K4_case_C12_a_top_k_of_0_or_above_the_vocabulary_is_off(top_k):
    plain = je.SamplingParams(temperature=2.0, seed=3)
    assert sampled_alone([3], dataclasses.replace(plain, top_k=top_k)) == sampled_alone([3], plain)


def test_K4_unset_fields_take_the_folders_values():
    search = {"do_sample": True, "temperature": 0.5, "top_k": 50, "top_p": 0.9}
    resolved = resolve_sampling(je.SamplingParams(), search)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.5, 50, 0.9)
    resolved = resolve_sampling(je.SamplingParams(temperature=2.0, top_k=0), search)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (2.0, 0, 0.9)
    assert resolve_sampling(je.SamplingParams(do_sample=False), search).temperature == 0.0
    assert resolve_sampling(je.SamplingParams(), search | {"do_sample": False}).temperature == 0.0


def test_case_C12_sampling_that_only_the_folders_top_k_of_1_prevents_is_warned_of_once_at_its_line():
    """C12: where the settings are given, to the core and to an engine, and nowhere else."""
    sampling = je.SamplingParams(temperature=0.8)
    model = toy_model(search={"top_k": 1, "temperature": 0.8})
    state, engine = je.init_state(model, SMALL), je.Engine(model, SMALL)
    given = je.RequestOptions(sampling=sampling)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = inspect.currentframe().f_lineno + 1
        state, request_id = je.create_request(state, given)
        je.begin_turn(state, request_id, [1])
        je.begin_turn(state, request_id, [1], je.TurnOptions(sampling=sampling))
        request = engine.create_request(given)
        request.begin_turn([1], je.TurnOptions(2))
        list(request.stream())
        request.begin_turn([1], je.TurnOptions(sampling=sampling))
    assert [each.lineno - first for each in caught] == [0, 2, 3, 6]
    assert {each.filename for each in caught} == {__file__}
    assert all("set SamplingParams.top_k to sample" in str(each.message) for each in caught)
    assert state.control.requests.temperature.tolist() == [0.0]


def test_case_C12_settings_that_no_folder_keeps_from_sampling_are_not_warned_of():
    search = {"top_k": 1, "temperature": 0.8}
    state = je.init_state(toy_model(search=search), SMALL)
    for fields in (
        {"temperature": 0.8, "top_k": 1},
        {},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 0},
        {"temperature": 0.8, "do_sample": False},
    ):
        je.create_request(state, je.RequestOptions(sampling=je.SamplingParams(**fields)))
    assert resolve_sampling(je.SamplingParams(temperature=0.8, top_k=0), search).temperature == 0.8


@pytest.mark.parametrize(
    ("search", "name"),
    [
        ({"temperature": "hot"}, "search.temperature"),
        ({"temperature": -1.0}, "search.temperature"),
        ({"temperature": float("nan")}, "search.temperature"),
        ({"top_k": -1}, "search.top_k"),
        ({"top_k": 2.5}, "search.top_k"),
        ({"top_p": 1.5}, "search.top_p"),
        ({"do_sample": "false"}, "search.do_sample"),
    ],
)
def test_K4_a_value_of_the_folder_that_is_out_of_range_is_named(search, name):
    state = je.init_state(toy_model(search={"do_sample": True} | search), SMALL)
    with pytest.raises((ValueError, TypeError), match=name):
        je.create_request(state)


def test_case_C13_rows_with_masked_ids_never_sample_them():
    """The toy's last four ids have logit -inf in every row."""
    state = begun(MODEL)
    for seed in range(4):
        sampling = je.SamplingParams(temperature=100.0, seed=seed)
        state, request_id = je.create_request(state, je.RequestOptions(15, sampling=sampling))
        state, _ = je.begin_turn(state, request_id, [seed])
    state, _ = finish(MODEL, state)
    drawn = [token for request_id in (1, 2, 3, 4) for token in tokens_of(state, request_id)[1:]]
    assert len(drawn) == 56
    assert max(drawn) < LETTERS
    assert len(set(drawn)) > 15
