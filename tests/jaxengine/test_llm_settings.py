"""`LLM` with several completions a prompt, stop strings, logprobs and grammars, whatever its batch size
(K1, K3, K5, L1, cases C2 and C4)."""

import re

import pytest

import jaxengine as je
from jaxengine.llm import LLM
from tests.cli.tiny_model import write_tiny_folder

PROMPTS = ["the quick", "a b c", "12 12"]
CHAT = [{"role": "user", "content": "hello"}]
WARM = je.SamplingParams(temperature=1.0, seed=5, logprobs=2, presence_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, je.EngineConfig(max_batch_size=4, num_blocks=16)) as llm:
        yield llm


@pytest.fixture(scope="module")
def narrow(folder):
    with LLM(folder, je.EngineConfig(max_batch_size=1, num_blocks=16)) as llm:
        yield llm


@pytest.mark.slow
def test_K3_several_completions_are_those_of_seeds_that_count_up(llm):
    together = llm.generate(PROMPTS, WARM, max_tokens=5, n=3)
    assert [each.prompt_token_ids for each in together] == [
        tuple(llm.tokenizer.encode(prompt)) for prompt in PROMPTS for _ in range(3)
    ]
    for nth in range(3):
        seeded = je.SamplingParams(temperature=1.0, seed=5 + nth, logprobs=2, presence_penalty=0.5)
        assert together[nth::3] == llm.generate(PROMPTS, seeded, max_tokens=5)
    assert len({each.token_ids for each in together}) == 9


def test_K3_without_a_seed_completions_differ_and_are_repeatable(llm):
    warm = je.SamplingParams(temperature=3.0)
    once = llm.generate(PROMPTS[:1], warm, max_tokens=6, n=4)
    assert len({each.token_ids for each in once}) == 4
    assert llm.generate(PROMPTS[:1], warm, max_tokens=6, n=4) == once
    # A second completion changes none of the first ones, and none is that of another prompt at its place.
    texts = [each.token_ids for each in llm.generate([PROMPTS[0]] * 3, warm, max_tokens=6)]
    doubled = [each.token_ids for each in llm.generate([PROMPTS[0]] * 3, warm, max_tokens=6, n=2)]
    assert doubled[::2] == texts
    assert len(set(doubled)) == 6
    assert llm.generate(PROMPTS[0], max_tokens=0, n=2) == llm.generate([PROMPTS[0]] * 2, max_tokens=0)


@pytest.mark.slow
def test_K1_K5_the_batch_size_changes_nothing(llm, narrow):
    text = llm.generate(PROMPTS[0], max_tokens=8)[0].text
    settings = je.SamplingParams(
        temperature=0.8, seed=3, logprobs=3, stop=[text[2:4], "e"], repetition_penalty=1.2, min_new_tokens=2
    )
    for run in (
        lambda engine: engine.generate(PROMPTS, settings, max_tokens=8, n=2),
        lambda engine: engine.chat([CHAT, CHAT], settings, max_tokens=8, n=2),
        lambda engine: engine.generate(
            PROMPTS, settings, max_tokens=8, grammar=je.Grammar.regex("[a-f]{1,5}")
        ),
    ):
        assert run(llm) == run(narrow)


@pytest.mark.parametrize("form", ["generate", "chat"])
def test_K5_case_C2_C4_a_completion_ends_before_its_stop_string(llm, form):
    prompt = [CHAT] if form == "chat" else PROMPTS[:1]
    run = getattr(llm, form)
    (plain,) = run(prompt, je.SamplingParams(logprobs=0), max_tokens=12)
    stop = plain.text[4:6]
    (stopped,) = run(prompt, je.SamplingParams(logprobs=0, stop=["never said", stop]), max_tokens=12)
    assert (stopped.stop, stopped.finish_reason) == (stop, je.FinishReason.STOP_STRING)
    assert stopped.text == plain.text[: plain.text.index(stop)]
    count = len(stopped.token_ids)
    assert stopped.token_ids == plain.token_ids[:count]
    assert stopped.logprobs == plain.logprobs[:count]
    assert stopped.usage.generated_tokens == count
    assert stop in llm.tokenizer.decode(stopped.token_ids)
    assert stop not in llm.tokenizer.decode(stopped.token_ids[:-1])


def test_K1_logprobs_come_one_a_token_and_only_where_asked_for(llm):
    eos = llm.model.config.eos_token_ids[0]
    for count in (0, 1, 20):
        (found,) = llm.generate("a", je.SamplingParams(logprobs=count), max_tokens=4)
        assert len(found.logprobs) == len(found.token_ids)
        for token, logprobs in zip(found.token_ids, found.logprobs, strict=True):
            assert len(logprobs.top) == count
            assert not count or logprobs.top[0] == (token, logprobs.chosen)
    assert llm.generate("a", max_tokens=4)[0].logprobs == ()
    (ended,) = llm.generate("a", je.SamplingParams(logprobs=1, logit_bias={eos: 500.0}), max_tokens=4)
    assert (ended.token_ids, ended.logprobs) == ((), ())


def test_K1_case_C16_a_prompt_is_scored_without_a_token(llm):
    asked = je.SamplingParams(prompt_logprobs=2, temperature=1.0, stop=["a"])
    found = llm.generate(PROMPTS, asked, max_tokens=0, grammar=je.Grammar.regex("[ab]"), n=2)
    plain = llm.generate(PROMPTS, je.SamplingParams(prompt_logprobs=2), max_tokens=3)
    assert [each.prompt_logprobs for each in found[::2]] == [each.prompt_logprobs for each in plain]
    assert found[::2] == found[1::2]
    for each in found:
        assert (each.token_ids, each.text, each.usage.generated_tokens) == ((), "", 0)
        assert each.finish_reason is je.FinishReason.MAX_GENERATED_TOKENS
        assert each.grammar_incomplete, "[ab] allows no empty text"


def test_L1_every_completion_follows_the_grammar(llm):
    warm = je.SamplingParams(temperature=1.5)
    found = llm.generate(PROMPTS, warm, max_tokens=20, grammar=je.Grammar.regex("[xyz]{3}"), n=2)
    assert all(re.fullmatch("[xyz]{3}", each.text) for each in found)
    assert len({each.text for each in found}) > 1
    assert {each.finish_reason for each in found} == {je.FinishReason.EOS}


@pytest.mark.parametrize("form", ["generate", "chat"])
def test_case_C28_a_completion_says_whether_its_grammar_was_cut(llm, form):
    prompt = [CHAT] if form == "chat" else PROMPTS
    run = getattr(llm, form)
    grammar = je.Grammar.regex("[ab]{3}")
    for limit in range(5):
        for each in run(prompt, max_tokens=limit, grammar=grammar):
            assert each.grammar_incomplete == (len(each.text) < 3) == (limit < 3)
    assert not run(prompt, max_tokens=0, grammar=je.Grammar.regex("a?"))[0].grammar_incomplete
    assert not run(prompt, max_tokens=1)[0].grammar_incomplete


@pytest.mark.parametrize("form", ["generate", "chat"])
def test_M6_drafts_from_the_text_itself_change_no_completion(llm, form):
    prompt = [CHAT] if form == "chat" else PROMPTS
    run = getattr(llm, form)
    plain = run(prompt, WARM, max_tokens=8)
    before = llm._engine.metrics.drafted_tokens
    assert run(prompt, WARM, max_tokens=8, proposer=je.NgramDrafts(shortest=1)) == plain
    assert llm._engine.metrics.drafted_tokens > before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n": 0}, ValueError, "n is 0; give a value from 1 to 2147483647"),
        ({"n": "2"}, TypeError, "n is '2'; give an integer"),
        ({"n": True}, TypeError, "n is True; give an integer"),
        ({"proposer": 3}, TypeError, "RequestOptions.proposer is 3; give an NgramDrafts"),
        ({"grammar": "[ab]"}, TypeError, r"RequestOptions.grammar is '\[ab\]'; give what Grammar"),
        (
            {"sampling": je.SamplingParams(stop_token_ids=[10**6])},
            ValueError,
            "SamplingParams.stop_token_ids names token 1000000; the vocabulary",
        ),
        (
            {"sampling": je.SamplingParams(ignore_eos=True), "grammar": je.Grammar.regex("a")},
            ValueError,
            "a grammar ends with an EOS, and this turn has none",
        ),
    ],
)
@pytest.mark.parametrize("form", ["generate", "chat"])
def test_T2_bad_values_are_named_before_anything_runs(llm, form, arguments, error, words):
    before = llm._engine.state
    with pytest.raises(error, match=words):
        getattr(llm, form)([CHAT] if form == "chat" else PROMPTS, max_tokens=3, **arguments)
    assert llm._engine.state is before
