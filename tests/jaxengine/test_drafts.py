"""Whatever is proposed, a turn says what it says alone without drafts, bit for bit (M2 to M5, cases C4, C15, C26)."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import LETTERS, VOCAB
from tests.jaxengine.drafting import EOS, MODELS, Asked, Player, alone
from tests.jaxengine.harness import SMALL

GREEDY = je.SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": je.SamplingParams(temperature=2.0, seed=3),
    "cut": je.SamplingParams(temperature=1.5, top_k=9, top_p=0.8, min_p=0.02, seed=11, logprobs=2),
    "penalised": je.SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.7, seed=5
    ),
    "greedy penalised": je.SamplingParams(
        temperature=0.0, frequency_penalty=1.5, logit_bias={24: 2.0, 9: 1.0}, logprobs=1,
        logprobs_from="sampling",
    ),
    "no repetitions": je.SamplingParams(temperature=0.0, no_repeat_ngram_size=2, repetition_penalty=0.6),
    "least": je.SamplingParams(temperature=3.0, min_new_tokens=5, stop_token_ids=(7, 8), seed=2),
    "own ends": je.SamplingParams(temperature=3.0, ignore_eos=True, stop_token_ids=(7, 8, 20), seed=4),
}  # fmt: skip
STOPS = je.SamplingParams(temperature=4.0, stop=("a", "bc", ".x", "q"), seed=9, logprobs=1)
CONFIGS = {
    "small": SMALL,
    "chunks": dataclasses.replace(SMALL, chunk_size=5),
    "static": je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, batching="static"),
    "few blocks": dataclasses.replace(SMALL, num_blocks=11, fairness_bound=4),
    "few tokens": dataclasses.replace(SMALL, max_scheduled_tokens=5),
}
prompts = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=6).map(tuple)
proposals = st.tuples(
    st.sampled_from(["right", "right", "right", "wrong at", "wrong at", "any", "end at", "none", "clear"]),
    st.integers(0, 9),
    st.integers(0, VOCAB - 1),
)


def drafts_of(player, request_id, proposal):
    """What a proposal comes to for a request, as long as the API allows; None for none."""
    how, nth, token = proposal
    upcoming = player.upcoming(request_id)
    match how:
        case "wrong at":
            upcoming[nth % len(upcoming)] = token
        case "any":
            upcoming = [(token * (place + 1)) % VOCAB for place in range(nth + 1)]
        case "end at":
            upcoming.insert(nth % len(upcoming), EOS[nth % 2])
        case "none":
            return None
        case "clear":
            return []
    return upcoming[: max(player.most(request_id), 0)]


def play(model, config, turns, script, turns_each=2):
    """Plays requests with proposals before each step, and compares each with itself alone."""
    player = Player(MODELS[model], CONFIGS[config])
    later = list(turns)
    order = []
    for nth in range(400):
        if later and (nth % 2 == 0 or not player.left):
            # A static batch of several takes no second turn.
            order.append(player.create(later.pop(0), 1 if config == "static" else 2))
        for request_id in player.ready():
            proposal = script[(nth * 3 + request_id) % len(script)]
            if (drafts := drafts_of(player, request_id, proposal)) is not None:
                if nth % 5 == 0:
                    player.propose(request_id, [])
                player.propose(request_id, drafts)
        player.step()
        for request_id in [r for r in order if r not in player.left and r in player.asked]:
            compare(player, request_id, config)
            player.state = je.close_request(player.state, request_id)
            del player.asked[request_id]
        if not later and not player.left:
            break
    assert not player.left
    if config == "static":
        player.run_out()
        player.state, _ = je.step(player.model, player.state)
    assert len(player.state.control.free_blocks) == player.state.control.num_blocks
    return player


def compare(player, request_id, config):
    turns, tokens = alone(player.asked[request_id])
    said = tuple(map(tuple, player.said[request_id]))
    assert said == turns[: len(said)]
    assert config == "static" or len(said) == len(turns)
    if len(said) == len(turns):
        assert player.tokens(request_id) == list(tokens)


def asked_of(model, samplings):
    return st.builds(
        Asked,
        model=st.just(model),
        prompt=prompts,
        sampling=st.sampled_from(samplings),
        limit=st.sampled_from([0, 1, 4, 9]),
        session=st.sampled_from([12, 22]),
        second=st.integers(0, LETTERS - 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "hybrid", "window"])
@settings(max_examples=10)
@given(data=st.data())
def test_M2_M3_M5_case_C15_C26_any_drafts_give_what_a_request_says_alone_without(model, data):
    """Greedy and sampled, with all processors, in mixed batches, chunks, rings, static batches and short pools."""
    # A model with fixed states takes no static batch; rings need chunks.
    configs = sorted(CONFIGS.keys() - ({"static"} if model == "hybrid" else set()))
    config = data.draw(st.sampled_from(configs + ["chunks"] * (model == "window")))
    turns = data.draw(st.lists(asked_of(model, list(SAMPLINGS.values())), min_size=1, max_size=4))
    play(model, config, turns, data.draw(st.lists(proposals, min_size=1, max_size=8)))


GRAMMARS = [
    None,
    je.Grammar.regex("(ab|cd|x+)*e"),
    je.Grammar.regex("[a-d]{2}forced span\\.[v-x]*"),
    je.Grammar.lark('start: "a" ("b" | "cab") start | "w"'),
]


@pytest.mark.slow
@settings(max_examples=10)
@given(data=st.data())
def test_M2_M3_case_C4_L5_drafts_with_stop_strings_and_grammars_change_no_text(data):
    """Texts, stop strings, ids, logprobs and usage end at the same place; forced spans run as drafts on both sides."""
    guided = st.builds(
        Asked,
        model=st.just("text"),
        prompt=prompts,
        sampling=st.sampled_from([GREEDY, SAMPLINGS["cut"], STOPS]),
        grammar=st.sampled_from(GRAMMARS),
        limit=st.sampled_from([0, 3, 9]),
        session=st.sampled_from([14, 26]),
        second=st.integers(0, LETTERS - 1),
    )
    config = data.draw(st.sampled_from(sorted(CONFIGS)))
    turns = data.draw(st.lists(st.one_of(guided, asked_of("text", [STOPS])), min_size=1, max_size=3))
    play("text", config, turns, data.draw(st.lists(proposals, min_size=1, max_size=8)))
