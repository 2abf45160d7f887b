"""`LLM` answers any number of prompts at once as if each were alone, and refuses bad ones before anything runs."""

import contextlib
import dataclasses
import gc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

import jaxengine as je
from jaxengine.llm import LLM
from jaxengine.text import TextError
from tests.cli.tiny_model import variant, write_tiny_folder

PROMPTS = ["hello", "a b c", "12 12", "x", "the quick brown fox", "世界 😀"]
SIZES = je.EngineConfig(max_batch_size=2, num_blocks=16)
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS[:3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def short(folder):
    """Sixteen tokens in all: the pool's one block."""
    with LLM(folder, je.EngineConfig(max_batch_size=2, num_blocks=1)) as llm:
        yield llm


def is_idle(llm):
    gc.collect()  # The traceback of an error that an earlier test caught may hold handles in a cycle.
    metrics = llm._engine.metrics
    return (
        metrics.residents == 0
        and metrics.free_blocks == metrics.num_blocks
        and len(llm._engine._handles) == 0
    )


def test_E6_more_prompts_than_rows_come_out_in_order_and_as_if_alone(llm):
    together = llm.generate(PROMPTS, max_tokens=6)
    alone = [llm.generate(prompt, max_tokens=6)[0] for prompt in PROMPTS]
    assert together == alone
    assert [completion.prompt_token_ids for completion in together] == [
        tuple(llm.tokenizer.encode(prompt)) for prompt in PROMPTS
    ]
    assert len({completion.token_ids for completion in together}) > 1
    assert is_idle(llm)


def test_K3_unseeded_sampling_is_the_same_in_a_pool_that_runs_short(folder):
    """A prompt that makes room comes back as another request; its random stream must not change with that."""
    sampling = je.SamplingParams(temperature=1.0)
    found = []
    for num_blocks in (SIZES.num_blocks, 8):
        with LLM(folder, dataclasses.replace(SIZES, num_blocks=num_blocks)) as llm:
            runs = [llm.generate(["a" * 20] * 6, sampling, max_tokens=60) for _ in range(2)]
            assert (llm._engine.metrics.preemptions > 0) == (num_blocks == 8)
        assert runs[0] == runs[1]
        found.append([completion.token_ids for completion in runs[0]])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_prompts_share_steps(llm):
    before = llm._engine.metrics.steps
    completions = llm.generate(PROMPTS[1:3], max_tokens=6)
    assert [len(completion.token_ids) for completion in completions] == [6, 6]
    assert llm._engine.metrics.steps - before == 6


def test_a_completion_tells_tokens_text_reason_and_usage(llm):
    (completion,) = llm.generate([[40, 41, 42]], je.SamplingParams(temperature=0.0), max_tokens=5)
    assert completion.prompt_token_ids == (40, 41, 42)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.finish_reason == je.FinishReason.MAX_GENERATED_TOKENS
    assert completion.usage == je.Usage(prompt_tokens=3, generated_tokens=5)
    assert completion.error == ""


@pytest.mark.parametrize("params", [None, je.SamplingParams(temperature=1.0, top_k=0, seed=3)])
def test_C11_E6_a_pool_too_small_for_all_at_once_changes_no_completion(folder, llm, params):
    """Ten blocks of four, three prompts that want up to nine each: the youngest gives its blocks back for a while."""
    with LLM(folder, je.EngineConfig(max_batch_size=4, num_blocks=10, block_size=4)) as tight:
        completions = tight.generate(PROMPTS[:4], params, max_tokens=26)
        assert is_idle(tight)
        assert tight._engine.metrics.preemptions
    assert completions == llm.generate(PROMPTS[:4], params, max_tokens=26)


@pytest.fixture(scope="module")
def tight(folder):
    with LLM(folder, je.EngineConfig(max_batch_size=4, num_blocks=10, block_size=4, fairness_bound=3)) as llm:
        yield llm


@given(
    prompts=st.lists(st.lists(st.integers(40, 90), min_size=1, max_size=20), min_size=1, max_size=6),
    params=st.sampled_from([None, je.SamplingParams(temperature=1.0, top_k=0, seed=3)]),
)
@example([[50 + n] * 16 for n in range(6)], None)
@settings(max_examples=8)
def test_C11_any_list_of_prompts_ends_with_the_tokens_of_a_roomy_pool(tight, llm, prompts, params):
    assert tight.generate(prompts, params, max_tokens=20) == llm.generate(prompts, params, max_tokens=20)
    assert is_idle(tight)


def test_K3_a_seed_makes_sampled_completions_repeatable(llm):
    params = je.SamplingParams(temperature=1.0, top_k=0, seed=5)
    first = llm.generate(PROMPTS[:3], params, max_tokens=6)
    assert llm.generate(PROMPTS[:3], params, max_tokens=6) == first
    assert llm.generate(PROMPTS[:3], dataclasses.replace(params, seed=6), max_tokens=6) != first


def test_chat_goes_through_the_template(llm):
    answers = llm.chat(CHATS, max_tokens=4)
    assert [answer.prompt_token_ids for answer in answers] == [
        tuple(llm.tokenizer.chat_ids(chat)) for chat in CHATS
    ]
    assert answers == llm.generate([llm.tokenizer.chat_ids(chat) for chat in CHATS], max_tokens=4)
    assert llm.chat(CHATS[0], max_tokens=4) == answers[:1]


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 100])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_case_C16_a_prompt_at_the_limit(short, length, max_tokens):
    """At most 16 in all: 15 leave room for one; 16 and 17 are refused, naming both numbers; 0 new means none."""
    prompt = [40] * length
    if length >= 16:
        with pytest.raises(ValueError, match=rf"prompt 0 is refused: .* {length} tokens of at most 16"):
            short.generate([prompt], max_tokens=max_tokens)
        return
    (completion,) = short.generate([prompt], max_tokens=max_tokens)
    expected = {
        None: (1, je.FinishReason.MAX_SESSION_TOKENS),
        0: (0, je.FinishReason.MAX_GENERATED_TOKENS),
        1: (1, je.FinishReason.MAX_GENERATED_TOKENS),
        100: (1, je.FinishReason.MAX_SESSION_TOKENS),
    }[max_tokens]
    assert (len(completion.token_ids), completion.finish_reason) == expected
    assert completion.usage == je.Usage(prompt_tokens=15, generated_tokens=expected[0])


def test_case_C16_no_new_tokens_is_a_counted_prompt_and_no_step(llm):
    before = llm._engine.metrics.steps
    completions = llm.generate(["hello", "12"], max_tokens=0)
    assert llm._engine.metrics.steps == before
    assert [(c.text, c.token_ids) for c in completions] == [("", ()), ("", ())]
    assert [c.usage.prompt_tokens for c in completions] == [
        len(llm.tokenizer.encode(text)) for text in ("hello", "12")
    ]


@pytest.mark.parametrize(
    ("bad", "error", "problem"),
    [
        ("", ValueError, "prompt 1 is refused: the turn has no tokens"),
        ([], ValueError, "prompt 1 is refused: the turn has no tokens"),
        ([1, 265], ValueError, "prompt 1 is refused: token 265 is outside the vocabulary of 265"),
        ([-1], ValueError, "prompt 1 is refused: token -1 is outside"),
        ([1.5], ValueError, "prompt 1 is refused: the turn's tokens are float64"),
        ([40] * 256, ValueError, "prompt 1 is refused: .* 256 tokens of at most 256"),
        ("half \ud83d", TextError, "prompt 1: the text holds .* half of a character"),
        (7, TypeError, "prompt 1 is 7; give a text or a list of token ids"),
    ],
)
def test_T2_one_bad_prompt_is_named_before_anything_runs(llm, bad, error, problem):
    before = llm._engine.metrics.steps
    with pytest.raises(error, match=problem):
        llm.generate(["hello", bad], max_tokens=4)
    assert llm._engine.metrics.steps == before
    assert is_idle(llm)


HELLO = {"role": "user", "content": "hello"}
CALLS = [
    ("generate", ({"hello": 1},), TypeError, "the prompts are of type dict; give a list of them"),
    ("generate", ({"hello", "a"},), TypeError, "the prompts are of type set; give a list"),
    ("generate", (b"hello",), TypeError, "the prompts are of type bytes; give a list"),
    ("generate", (None,), TypeError, "the prompts are of type NoneType; give a list"),
    ("generate", (7,), TypeError, "the prompts are of type int; give a list"),
    ("generate", ([1, 2],), TypeError, "prompt 0 is 1; give a text or a list of token ids"),
    ("generate", ([b"hello"],), TypeError, "prompt 0 is b'hello'; give a text or a list"),
    ("generate", ([{"hello": 1}],), TypeError, "prompt 0 is {'hello': 1}; give a text or a list"),
    ("generate", ([None],), TypeError, "prompt 0 is None; give a text or a list"),
    (
        "generate",
        ([np.ones((1, 2), int)],),
        ValueError,
        r"prompt 0 is refused: .* int64\[1, 2\]; give a flat",
    ),
    (
        "generate",
        ("hello", {"temperature": 1.0}),
        TypeError,
        "sampling is {.*; give a SamplingParams or nothing",
    ),
    ("generate", ([], je.RequestOptions()), TypeError, "sampling is RequestOptions"),
    ("chat", (HELLO,), TypeError, "the conversations are of type dict; give a list"),
    ("chat", ("hello",), TypeError, "the conversations are of type str; give a list"),
    ("chat", (None,), TypeError, "the conversations are of type NoneType; give a list"),
    ("chat", ([CHATS[0], [{"role": "user"}]],), TextError, "conversation 1: the chat template refuses"),
    ("chat", (["hello"],), TextError, "conversation 0: a chat is a list of messages"),
    ("chat", ([7],), TextError, "conversation 0: a chat is a list of messages"),
    ("chat", ([[]],), TextError, "conversation 0: a chat is a list of messages with at least one in it"),
    ("chat", ([CHATS[0], HELLO],), TextError, "conversation 1: a chat is a list of messages"),
    ("chat", ([["hello"]],), TextError, "conversation 0: a chat message is a mapping"),
    ("chat", ([[{"content": "hello"}]],), TextError, "conversation 0: a chat message is a mapping"),
    ("chat", ([CHATS[0]], 3), TypeError, "sampling is 3; give a SamplingParams or nothing"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "words"), CALLS)
def test_T2_what_a_call_refuses_is_named_before_anything_runs(llm, name, arguments, error, words):
    before = llm._engine.state
    with pytest.raises(error, match=words):
        getattr(llm, name)(*arguments, max_tokens=4)
    assert llm._engine.state is before
    assert is_idle(llm)


@pytest.mark.parametrize("name", ["generate", "chat"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (-1, ValueError, "max_tokens is -1; give a value from 0"),
        (2**63, ValueError, "max_tokens is 9223372036854775808; give a value from 0"),
        ("5", TypeError, "max_tokens is '5'; give an integer"),
        (1.5, TypeError, "max_tokens is 1.5; give an integer"),
        (True, TypeError, "max_tokens is True; give an integer"),
    ],
)
def test_T2_a_limit_that_is_none_is_named(llm, name, value, error, words):
    with pytest.raises(error, match=words):
        getattr(llm, name)([], max_tokens=value)


def test_no_prompts_have_no_completions(llm):
    assert llm.generate([]) == llm.chat([]) == llm.generate(()) == []


@pytest.mark.parametrize("form", [tuple, iter, lambda prompts: np.array(prompts)])
def test_prompts_come_in_any_order_of_things(llm, form):
    assert llm.generate(form([[40, 41], [42, 43]]), max_tokens=2) == llm.generate(
        [[40, 41], [42, 43]], max_tokens=2
    )


def test_F7_a_prompt_that_fails_costs_the_others_nothing(folder, llm):
    """One token's embedding is no number: its request fails, the rest is as without it."""
    with LLM(folder, SIZES) as broken:
        poison = broken.tokenizer.encode("Z")[0]
        params = broken.model.decoder.params
        (name,) = [name for name in params if ":table" in name]
        scales = np.array(params[name].scales)
        scales[poison] = np.nan
        params[name] = dataclasses.replace(params[name], scales=scales)
        completions = broken.generate(["hello", "aZ", "x"], max_tokens=4)
    assert [completions[0], completions[2]] == llm.generate(["hello", "x"], max_tokens=4)
    assert completions[1].finish_reason == je.FinishReason.FAILED
    assert completions[1].token_ids == ()
    assert "finite" in completions[1].error


def failing(stack, times):
    for _ in range(times):
        stack.enter_context(je.inject_fault(je.Stage.PACK, je.RetryableStepError("the bus is down")))


def test_F1_a_step_that_fails_for_ever_ends_the_call(llm):
    """Nobody is named, so nobody's turn fails: 2 retries a row, 2 for all rows and 2 for the halves of 2."""
    expected = llm.generate(PROMPTS, max_tokens=4)
    with contextlib.ExitStack() as stack:
        failing(stack, 7)
        with pytest.raises(je.EngineError, match=r"7 steps in a row failed, the last one by: .*bus is down"):
            llm.generate(PROMPTS, max_tokens=4)
    assert is_idle(llm)
    with contextlib.ExitStack() as stack:
        failing(stack, 6)
        assert llm.generate(PROMPTS, max_tokens=4) == expected


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_requests_are_closed_whatever_ends_the_call(llm, monkeypatch, interruption):
    """Ctrl-C in the middle leaves an engine that works."""
    expected = llm.generate(PROMPTS, max_tokens=4)
    run, calls = llm._engine.run, iter(range(100))

    def interrupted(*args):
        if next(calls) == 3:
            raise interruption
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "run", interrupted)
        with pytest.raises(interruption):
            llm.generate(PROMPTS, max_tokens=4)
    assert is_idle(llm)
    assert llm.generate(PROMPTS, max_tokens=4) == expected


def test_case_C10_a_tokenizer_wider_than_the_logits_is_refused_when_loading(folder, tmp_path):
    from tokenizers import Tokenizer

    wide = variant(folder, tmp_path / "wide", drop=("tokenizer.json",))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["one more"])
    backend.save(str(wide / "tokenizer.json"))
    with pytest.raises(TextError, match="ids up to 265 but the model only 265 logits"):
        LLM(wide)


def test_case_C12_sampling_that_the_folder_makes_greedy_is_warned_of(folder, tmp_path):
    with LLM(variant(folder, tmp_path / "greedy", {"top_k": 1}), SIZES) as llm:
        with pytest.warns(UserWarning, match="the model folder sets top_k to 1") as caught:
            llm.generate("hello", je.SamplingParams(temperature=0.8), max_tokens=1, n=2)
        assert {each.filename for each in caught} == {__file__}
        assert len({each.lineno for each in caught}) == 1, "once by default"
        llm.generate("hello", je.SamplingParams(temperature=0.8, top_k=5), max_tokens=1)


def test_a_closed_llm_refuses_work(folder):
    llm = LLM(folder)
    llm.close()
    llm.close()
    with pytest.raises(je.EngineError, match="closed"):
        llm.generate("hello")


def test_L1_L4_a_grammar_bounds_every_completion(llm):
    made = llm.generate(PROMPTS[:3], max_tokens=9, grammar=je.Grammar.regex("red|green|blue"))
    for completion in made:
        assert completion.text in ("red", "green", "blue")
        assert completion.finish_reason == je.FinishReason.EOS
    with pytest.raises(ValueError, match="the grammar can't be used with this model"):
        llm.generate(PROMPTS[:3], max_tokens=9, grammar=je.Grammar.lark("start: <no_such_token>"))
    assert is_idle(llm)
