"""E5 and E6: a request's logits are bit for bit those of the request run alone, whatever the engine does around it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from tests.jaxengine.serving import Served, differences, serve

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
LENGTHS = (1, 9, 16, 130, 252)
"""Prompt lengths: with what is generated they cross key tiles in prefill and in decode, and blocks of every size."""
MOST = 7

CROWDED = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=40, block_size=16)
CHUNKED = je.EngineConfig(
    max_batch_size=3, max_scheduled_tokens=16, num_blocks=250, block_size=5, chunk_size=7
)
WHOLE = je.EngineConfig(max_batch_size=2, max_scheduled_tokens=512, num_blocks=20, block_size=33)
ALONE = dataclasses.replace(CROWDED, max_scheduled_tokens=512)
"""The first three together: chunk cuts everywhere, batches of 1 to 4, several prompts in one step, blocks of 5, 16 and
33, and pools too small for all. Few shapes, because compiling them is most of the time that these tests take."""

SAMPLING = (
    je.SamplingParams(temperature=0.0),
    je.SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=11),
)


@functools.cache
def model_of(folder: str, weights: str) -> je.Model:
    return je.load_model(MODELS / folder, weights=weights)


@functools.cache
def prompts_of(folder: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(len(folder))
    return tuple(rng.integers(3, 320, length) for length in LENGTHS)


@functools.cache
def alone(folder: str, weights: str, nth: int, sampled: bool) -> Served:
    """Prompt `nth` served in one chunk by an engine with no other request."""
    prompt = prompts_of(folder)[nth]
    return serve(model_of(folder, weights), ALONE, [prompt], most=MOST, sampling=[SAMPLING[sampled]])


def compare(
    folder: str,
    weights: str,
    config: je.EngineConfig,
    chosen: list[tuple[int, int, bool]],
    dropped: frozenset[int],
) -> Served:
    """Serves (prompt, arrival, sampled) triples together and fails where a bit differs from the prompt served alone."""
    prompts = prompts_of(folder)
    got = serve(
        model_of(folder, weights),
        config,
        [prompts[nth] for nth, _, _ in chosen],
        most=MOST,
        arrivals=[arrival for _, arrival, _ in chosen],
        sampling=[SAMPLING[sampled] for _, _, sampled in chosen],
        dropped=dropped,
    )
    parts = [alone(folder, weights, nth, sampled) for nth, _, sampled in chosen]
    expected = Served(
        logits={(i, length): row for i, part in enumerate(parts) for (_, length), row in part.logits.items()},
        tokens=[part.tokens[0] for part in parts],
        steps=0,
        widest=0,
    )
    found = differences(got, expected)
    assert not found, f"{folder} {weights} {config} {chosen}: {'; '.join(found)}"
    assert got.tokens == expected.tokens
    return got


LONG = (pytest.mark.slow, pytest.mark.thorough)

requests = st.lists(
    st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(0, 12), st.booleans()), min_size=2, max_size=6
)
drops = st.frozensets(st.integers(0, 20), max_size=4)


@pytest.mark.parametrize(
    ("folder", "weights", "config"),
    [
        pytest.param("cpu-fp32/llama", "exact", CROWDED, id="fp32-crowded"),
        pytest.param("cpu-fp32/llama", "exact", CHUNKED, id="fp32-chunked"),
        pytest.param("cpu-fp32/llama", "exact", WHOLE, id="fp32-whole", marks=LONG),
        pytest.param("cpu-int4/llama", "fast", CROWDED, id="int8-crowded"),
        pytest.param("cpu-int4/llama", "fast", CHUNKED, id="int8-chunked", marks=LONG),
        pytest.param("cpu-int4/llama", "fast", WHOLE, id="int8-whole", marks=LONG),
    ],
)
@settings(max_examples=12)
@given(chosen=requests, dropped=drops)
def test_E5_E6_logits_are_those_of_the_request_alone(folder, weights, config, chosen, dropped):
    """Random company, arrivals, chunks, blocks, batch limits, budgets and dropped steps change no bit."""
    compare(folder, weights, config, chosen, dropped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "weights"),
    [
        pytest.param("cpu-fp32/qwen2", "exact", marks=LONG),
        ("cpu-fp32/qwen3", "exact"),
        pytest.param("cpu-fp32/mistral", "exact", marks=LONG),
        ("cpu-int4/qwen3", "fast"),
    ],
    ids=["qwen2", "qwen3", "mistral", "qwen3-int8"],
)
def test_E5_E6_hold_for_every_family(folder, weights):
    everyone = [(nth, 2 * nth, bool(nth % 2)) for nth in range(len(LENGTHS))]
    config = dataclasses.replace(CROWDED, chunk_size=9)
    got = compare(folder, weights, config, everyone[::-1], frozenset((0, 3)))
    assert got.widest == 4


def begin(
    model: je.Model,
    config: je.EngineConfig,
    tokens: np.ndarray,
    most: int,
    state: je.EngineState | None = None,
) -> tuple[je.EngineState, int]:
    """A state with one more greedy request, queued with `tokens`."""
    state = je.init_state(model, config) if state is None else state
    state, request_id = je.create_request(state, je.RequestOptions(sampling=SAMPLING[0]))
    return je.begin_turn(state, request_id, tokens, je.TurnOptions(max_generated_tokens=most))[0], request_id


def run_turn(
    model: je.Model, state: je.EngineState, request_id: int
) -> tuple[je.EngineState, list[int], np.ndarray]:
    """Steps until the request's turn is over: the state, its tokens and the logits behind the last of them."""
    logits = np.zeros(0)
    while True:
        plan = je.plan_step(state)
        if plan.outcome is je.StepOutcome.NO_WORK:
            (row,) = np.flatnonzero(state.control.requests.id == request_id)
            length = int(state.control.requests.length[row])
            return state, state.control.tokens.read(int(row), 0, length).tolist(), logits
        transaction = je.execute(model, state, plan)
        for nth, row in enumerate(plan.rows):
            if row.request_id == request_id and row.samples:
                logits = np.array(transaction.logits)[nth]
        state, events = je.commit(state, transaction)
        je.check_invariants(state)
        state, _ = je.drain(state, len(events))


@pytest.mark.parametrize(
    ("folder", "weights"), [("cpu-fp32/llama", "exact"), ("cpu-int4/llama", "fast")], ids=["fp32", "int8"]
)
@pytest.mark.parametrize("split", [1, 60, 125])
@pytest.mark.parametrize("steps_before_cancel", [None, 0, 2])
def test_E6_A15_a_session_of_turns_equals_its_one_shot_prompt(folder, weights, split, steps_before_cancel):
    """The second turn replays what the first left out; then its logits are those of one prompt with everything."""
    model, prompt = model_of(folder, weights), prompts_of(folder)[3]
    state, request_id = begin(model, CHUNKED, prompt[:split], 5)
    if steps_before_cancel is None:
        state, sequence, _ = run_turn(model, state, request_id)
    else:
        for _ in range(steps_before_cancel):
            state, _ = je.step(model, state)
        state, _ = je.cancel_turn(state, request_id, 1)
        state, sequence, _ = run_turn(model, je.drain(state, 100)[0], request_id)
    assert sequence[:split] == prompt[:split].tolist()
    state, _ = je.begin_turn(state, request_id, prompt[split:], je.TurnOptions(max_generated_tokens=MOST))
    state, tokens, logits = run_turn(model, state, request_id)
    once, other_id = begin(model, ALONE, np.array([*sequence, *prompt[split:]]), MOST)
    _, expected_tokens, expected = run_turn(model, once, other_id)
    assert tokens == expected_tokens
    np.testing.assert_array_equal(logits, expected)
