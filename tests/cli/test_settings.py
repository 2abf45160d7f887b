"""Options for how tokens are chosen, where a reply ends and what it follows reach the engine (K1, K2, K5, L1, T2)."""

import io
import json
import re

import pytest

import jaxengine as je
from jaxengine.cli import main
from jaxengine.llm import LLM
from tests.cli.tiny_model import CONTEXT

PROMPT = "the quick"  # the tiny model doesn't end its answer to this by itself


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, je.EngineConfig(max_batch_size=1, num_blocks=CONTEXT // 16)) as llm:
        yield llm


@pytest.fixture
def generate(tiny, capsys):
    def generate(*words, tokens=16):
        command = ["generate", PROMPT, "--raw", "--model", str(tiny), "--max-tokens", str(tokens)]
        assert main([*command, *words]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return generate


@pytest.mark.slow
def test_K1_each_option_is_the_engines_setting(llm, generate):
    plain = llm.generate(PROMPT, max_tokens=16)[0]
    first = plain.token_ids[0]
    second = next(token for token in plain.token_ids if token != first)
    cases = [
        (["--min-p", "0.3", "--seed", "3"], {"min_p": 0.3, "seed": 3}),
        (["--repetition-penalty", "3"], {"repetition_penalty": 3.0}),
        (["--presence-penalty", "2"], {"presence_penalty": 2.0}),
        (["--frequency-penalty=-2"], {"frequency_penalty": -2.0}),
        (["--no-repeat-ngram", "1"], {"no_repeat_ngram_size": 1}),
        (
            ["--logit-bias", f"{first}=-50", "--logit-bias", f"{second}=50"],
            {"logit_bias": {first: -50.0, second: 50.0}},
        ),
        (["--stop-token", str(second), "--stop-token", "0"], {"stop_token_ids": [second, 0]}),
        (
            ["--stop-token", str(first), "--min-new-tokens", "3"],
            {"stop_token_ids": [first], "min_new_tokens": 3},
        ),
    ]
    usual, outs = generate(tokens=8), []
    for words, fields in cases:
        outs.append(generate(*words, tokens=8))
        assert outs[-1] == llm.generate(PROMPT, je.SamplingParams(**fields), max_tokens=8)[0].text, words
    assert sum(out != usual for out in outs) >= 6


def test_case_C9_ignoring_eos_goes_on_behind_it(tiny, llm, generate):
    eos = llm.model.config.eos_token_ids[0]
    bias = ["--logit-bias", f"{eos}=500"]
    assert generate(*bias) == ""
    ignoring = je.SamplingParams(ignore_eos=True, logit_bias={eos: 500.0})
    (completion,) = llm.generate(PROMPT, ignoring, max_tokens=16)
    assert completion.token_ids == (eos,) * 16
    assert generate(*bias, "--ignore-eos") == completion.text


def test_K5_case_C2_a_stop_string_is_never_written(tiny, llm, monkeypatch):
    """Every flush that a reader can see is a head of the text before the stop."""
    text = llm.generate(PROMPT, max_tokens=16)[0].text
    stop = text[5:9]
    flushed = []

    class Output(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Output())
    words = ["--raw", "--model", str(tiny), "--max-tokens", "16", "--stop", stop, "--stop", "never said"]
    assert main(["generate", PROMPT, *words]) == 0
    shown = text[: text.index(stop)]
    assert flushed[-1] == shown + "\n"
    assert all((shown + "\n").startswith(seen) for seen in flushed)


def test_K5_a_chat_goes_on_after_a_stop(tiny, monkeypatch, capsys):
    def replies(*words):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n{PROMPT}\n"))
        assert main(["chat", "--model", str(tiny), "--max-tokens", "12", *words]) == 0
        return capsys.readouterr().out

    whole = replies()
    first = whole.partition("\n")[0]
    stop = first[3:5]
    stopped = replies("--stop", stop)
    assert stopped.startswith(first[: first.index(stop)] + "\n")
    assert stop not in stopped
    assert stopped != whole


def test_L1_a_reply_follows_its_grammar(generate, tmp_path):
    assert re.fullmatch("[ab]{3}", generate("--regex", "[ab]{3}"))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    given = generate("--json-schema", json.dumps(schema))
    assert json.loads(given) in ({"a": 1}, {"a": 2})
    assert generate("--json-schema", str(file)) == given
    lark = tmp_path / "some.lark"
    lark.write_text('start: "x" ("y" | "z")\n')
    assert generate("--lark", str(lark)) in ("xy", "xz")


def test_drafts_change_no_reply(generate):
    bias = ["--frequency-penalty=-2", "--temperature", "1"]
    assert generate(*bias, "--drafts", "4", tokens=40) == generate(*bias, tokens=40)


def test_case_C28_an_answer_that_was_cut_before_its_grammar_ended_says_so(tiny, capsys):
    words = ["--raw", "--model", str(tiny), "--regex", "[ab]{3}"]
    for limit, told in ((2, True), (3, False), (4, False)):
        assert main(["generate", PROMPT, *words, "--max-tokens", str(limit)]) == 0
        err = capsys.readouterr().err
        assert ("the reply is incomplete: it ended before its grammar did\n" in err) == told


def test_K3_several_answers_are_the_librarys(tiny, llm, capsys):
    words = ["--raw", "--model", str(tiny), "--max-tokens", "9", "--temperature", "3", "--n", "3"]
    for seed in (None, 4):
        options = [] if seed is None else ["--seed", str(seed)]
        assert main(["generate", PROMPT, *words, *options]) == 0
        out, err = capsys.readouterr()
        expected = llm.generate(PROMPT, je.SamplingParams(temperature=3.0, seed=seed), max_tokens=9, n=3)
        assert out == "".join(f"{each.text}\n" for each in expected)
        assert len({each.text for each in expected}) == 3
        assert [line for line in err.splitlines() if "answer" in line] == [
            f"jaxengine: answer {nth} of 3" for nth in (1, 2, 3)
        ]


def test_K1_logprobs_are_printed_a_line_a_token(tiny, llm, capsys):
    words = ["--raw", "--model", str(tiny), "--max-tokens", "5"]
    for top in (0, 2):
        assert main(["generate", PROMPT, *words, "--logprobs", str(top)]) == 0
        out, err = capsys.readouterr()
        (expected,) = llm.generate(PROMPT, je.SamplingParams(logprobs=top), max_tokens=5)
        assert out == expected.text + "\n"
        *lines, last = err.splitlines()
        assert last == "jaxengine: stopped at --max-tokens 5"
        assert len(lines) == len(expected.token_ids)
        for line, token, logprobs in zip(lines, expected.token_ids, expected.logprobs, strict=True):
            own, *others = [
                float(number) for number in re.findall(r" (-?[0-9]+\.[0-9]{3})(?=,|  of|$)", line)
            ]
            assert own == pytest.approx(logprobs.chosen, abs=6e-4)
            assert others == pytest.approx([logprob for _, logprob in logprobs.top], abs=6e-4)
            piece = llm.tokenizer.special_tokens.get(token)
            piece = piece.encode() if piece else llm.tokenizer.piece(token, first=False)
            assert line.startswith(
                (repr(piece.decode(errors="replace")), repr(piece), piece.decode("latin1"))
            )
