"""K1: log-probabilities of a turn's input, told with the turn's first event, however the input was cut."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import LETTERS, logits_after, toy_model
from tests.jaxengine.harness import SMALL

MODEL = toy_model()
SCORED = je.SamplingParams(temperature=0.0, prompt_logprobs=2)
prompts = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=9)


def logprob(prefix, token):
    logits = logits_after(prefix)
    return logits[token] - np.log(np.exp(logits).sum())


def scores_of(events):
    """What the events of one request tell of its input; only the first may tell anything."""
    assert all(not event.prompt_logprobs for event in events[1:])
    return events[0].prompt_logprobs


def turn(engine, request, tokens, limit=2):
    request.begin_turn(tokens, je.TurnOptions(limit))
    events = []
    while engine.has_pending_requests():
        events += [event for event in engine.run() if event.request is request]
    return events


@settings(max_examples=15)
@given(
    turns=st.lists(prompts, min_size=1, max_size=3), chunk=st.sampled_from([None, 1, 3]), drop=st.booleans()
)
def test_K1_each_token_of_an_input_has_its_logprob_after_all_before_it(turns, chunk, drop):
    config = dataclasses.replace(SMALL, chunk_size=chunk)
    with je.Engine(MODEL, config) as engine:
        other = engine.create_request()
        other.begin_turn([5, 6, 7, 8, 9], je.TurnOptions(20))
        request = engine.create_request(je.RequestOptions(sampling=SCORED))
        for tokens in turns:
            before = request.tokens.tolist()
            if drop:
                state = engine.state
                je.execute(MODEL, state, je.plan_step(state)) if je.plan_step(state).rows else None
            found = scores_of(turn(engine, request, tokens))
            assert len(found) == len(tokens)
            for nth, (score, token) in enumerate(zip(found, tokens, strict=True)):
                prefix = [*before, *tokens[:nth]]
                if not prefix:
                    assert score is None
                    continue
                assert score.chosen == pytest.approx(logprob(prefix, token), abs=1e-4)
                best = int(np.argmax(logits_after(prefix)))
                assert [entry[0] for entry in score.top] == [best, (best + 1) % LETTERS]


def test_K1_after_an_eos_nothing_is_left_that_predicts_the_first_token():
    """The sequence is processed to its end then, and its last logits are gone."""
    prompt = [3, 1]
    model = toy_model(eos=[int(np.argmax(logits_after(prompt)))])
    with je.Engine(model, SMALL) as engine:
        request = engine.create_request(je.RequestOptions(sampling=SCORED))
        (end,) = turn(engine, request, prompt)
        assert end.finish_reason is je.FinishReason.EOS
        assert [score is None for score in scores_of([end])] == [True, False]
        second = scores_of(turn(engine, request, [4, 4, 4]))
        assert [score is None for score in second] == [True, False, False]


def test_K1_a_prompt_that_gives_way_is_scored_once():
    """Preempted halfway and run again, the same scores come with the same first event."""
    config = dataclasses.replace(SMALL, num_blocks=6, max_scheduled_tokens=6, fairness_bound=2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    with je.Engine(MODEL, config) as engine:
        requests = [engine.create_request(je.RequestOptions(sampling=SCORED)) for _ in range(3)]
        for request in requests:
            request.begin_turn(tokens, je.TurnOptions(4))
        events = {request: [] for request in requests}
        while engine.has_pending_requests():
            for event in engine.run():
                events[event.request].append(event)
                if je.EngineEventFlags.TURN_FINISHED in event.flags:
                    event.request.close()
        assert engine.metrics.preemptions
        found = [scores_of(told) for told in events.values()]
        assert found[0] == found[1] == found[2]
        assert [score is None for score in found[0]] == [True] + [False] * 11


def test_K1_what_a_cancelled_turn_left_to_run_is_not_scored():
    """It is run in pieces in front of the next turn's input, whose scores begin with that input."""
    left, tokens = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6]
    with je.Engine(MODEL, dataclasses.replace(SMALL, chunk_size=4)) as engine:
        request = engine.create_request(je.RequestOptions(sampling=SCORED))
        request.cancel_turn(request.begin_turn(left))
        engine.run()
        found = scores_of(turn(engine, request, tokens))
    expected = [logprob([*left, *tokens[:nth]], token) for nth, token in enumerate(tokens)]
    assert [score.chosen for score in found] == pytest.approx(expected, abs=1e-4)


def test_K1_a_prompt_is_scored_from_the_models_logits_wherever_it_is_cut():
    """Even where the logprobs of what is chosen are those of the distribution drawn from."""
    sampling = je.SamplingParams(temperature=0.5, top_k=2, prompt_logprobs=2, logprobs_from="sampling")
    tokens, found = [1, 2, 3, 4, 5, 6, 7], []
    for chunk in (None, 3):
        with je.Engine(MODEL, dataclasses.replace(SMALL, chunk_size=chunk)) as engine:
            request = engine.create_request(je.RequestOptions(sampling=sampling))
            found.append(scores_of(turn(engine, request, tokens)))
    assert found[0] == found[1]


def test_K1_M3_drafts_leave_the_logprobs_of_a_turn_whose_prompt_is_scored():
    sampling = dataclasses.replace(SCORED, logprobs=1)
    found = []
    for drafts in ([], [27, 27, 27]):
        with je.Engine(MODEL, SMALL) as engine:
            request = engine.create_request(je.RequestOptions(sampling=sampling))
            request.begin_turn([3, 1], je.TurnOptions(6))
            events = engine.run()
            request.set_draft_tokens(drafts)
            found.append([event.logprobs for event in [*events, *request.stream()]])
    assert found[0] == found[1]


def test_K1_prompts_are_scored_in_pieces_that_bound_the_logits():
    model = toy_model(context_length=200)
    config = je.EngineConfig(max_batch_size=2, max_scheduled_tokens=256, num_blocks=64, block_size=4)
    state = je.init_state(model, config)
    state, request_id = je.create_request(state, je.RequestOptions(sampling=SCORED))
    state, _ = je.begin_turn(state, request_id, [1] * 150)
    (row,) = je.plan_step(state).rows
    assert row.num_tokens == 64
