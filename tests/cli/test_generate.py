"""`jaxengine generate` streams the model's answer and nothing else to standard output."""

import io
import os
import signal

import pytest

import jaxengine as je
from jaxengine.cli import main
from jaxengine.llm import LLM
from tests.cli.tiny_model import CONTEXT, variant

LONG = "the quick"  # the tiny model doesn't end its answer to this by itself


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(
        tiny, je.EngineConfig(max_batch_size=1, num_blocks=CONTEXT // 16)
    ) as llm:  # the command's own sizes
        yield llm


def chat(*messages: tuple[str, str]):
    return [{"role": role, "content": content} for role, content in messages]


def test_T1_the_answer_is_the_librarys_through_the_chat_template(tiny, llm, capsys):
    assert main(["generate", "hello", "--model", str(tiny), "--max-tokens", "12", "--show-ids"]) == 0
    out, err = capsys.readouterr()
    (expected,) = llm.chat(chat(("user", "hello")), max_tokens=12)
    assert out == expected.text + "\n"
    assert f"prompt ids: {' '.join(map(str, expected.prompt_token_ids))}\n" in err


def test_case_C27_raw_text_and_a_system_message(tiny, llm, capsys):
    assert main(["generate", "hello", "--raw", "--model", str(tiny), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == llm.generate("hello", max_tokens=3)[0].text + "\n"
    words = ["generate", "hello", "--system", "Be brief.", "--model", str(tiny), "--max-tokens", "3"]
    assert main(words) == 0
    (expected,) = llm.chat(chat(("system", "Be brief."), ("user", "hello")), max_tokens=3)
    assert capsys.readouterr().out == expected.text + "\n"


def test_K3_sampling_options_and_seed(tiny, llm, capsys):
    def sampled(seed):
        options = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", str(seed)]
        assert main(["generate", "hello", "--raw", "--model", str(tiny), "--max-tokens", "9", *options]) == 0
        return capsys.readouterr().out

    params = je.SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=3)
    assert sampled(3) == sampled(3) == llm.generate("hello", params, max_tokens=9)[0].text + "\n"
    assert sampled(6) != sampled(3)


def test_a_limit_that_cut_the_answer_is_told(tiny, tmp_path, capsys):
    assert main(["generate", LONG, "--model", str(tiny), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().err == "jaxengine: stopped at --max-tokens 3\n"
    short = variant(tiny, tmp_path / "short", {"max_length": 16})
    assert main(["generate", "x" * 12, "--raw", "--model", str(short)]) == 0
    assert capsys.readouterr().err == "jaxengine: stopped at the model's limit of 16 tokens in all\n"


def test_a_folder_without_a_template_gets_the_prompt_as_it_is(tiny, llm, tmp_path, capsys):
    plain = variant(tiny, tmp_path / "plain", drop=("tokenizer_config.json", "chat_template.jinja"))
    assert main(["generate", "hello", "--model", str(plain), "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == llm.generate("hello", max_tokens=3)[0].text + "\n"
    assert "this model has no chat template; the prompt is given as it is" in err
    assert main(["generate", "hello", "--system", "x", "--model", str(plain)]) == 1
    assert "no chat template" in capsys.readouterr().err


def test_case_C16_a_prompt_at_the_limit_is_refused_with_both_numbers(tiny, tmp_path, capsys):
    short = variant(tiny, tmp_path / "short", {"max_length": 16})
    for length, status in ((15, 0), (16, 1), (17, 1)):
        assert main(["generate", "x" * length, "--raw", "--model", str(short)]) == status
        assert status == 0 or f"{length} tokens of at most 16" in capsys.readouterr().err


def test_case_C12_sampling_that_the_folder_makes_greedy_is_warned_of(tiny, tmp_path, start):
    greedy = variant(tiny, tmp_path / "greedy", {"top_k": 1})
    process = start("generate", "hello", "--model", greedy, "--max-tokens", 2, "--temperature", 0.8)
    _, err = process.communicate()
    assert process.returncode == 0
    assert b"jaxengine: warning: sampling was asked for but the model folder sets top_k to 1" in err
    assert b"set --top-k to sample" in err
    assert b".py" not in err


def test_T2_ctrl_c_while_streaming_ends_with_a_sentence(tiny, start):
    """The first piece has come, so the answer is under way; without the signal it would go on for a thousand tokens."""
    process = start("generate", LONG, "--model", tiny, "--max-tokens", 1000)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b"jaxengine: interrupted\n"
    text = (first + out).decode()  # raises for a character cut in two
    assert text.endswith("\n")
    assert len(text) < 900


def test_T2_nobody_reading_is_no_traceback(tiny, start):
    process = start("generate", LONG, "--model", tiny, "--max-tokens", 1000)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_case_C18_each_piece_is_flushed_and_whole(tiny, llm, monkeypatch):
    """Every write that a reader can see is text in itself, and the pieces come one by one."""
    flushed: list[str] = []

    class Output(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Output())
    assert main(["generate", "世界 😀", "--raw", "--model", str(tiny), "--max-tokens", "40"]) == 0
    (expected,) = llm.generate("世界 😀", max_tokens=40)
    assert flushed[-1] == expected.text + "\n"
    assert len(set(flushed)) > 10
    for seen in flushed:
        assert flushed[-1].startswith(seen)


def test_a_terminal_without_unicode_shows_question_marks(tiny, llm, start, monkeypatch):
    monkeypatch.setitem(os.environ, "PYTHONIOENCODING", "ascii")
    process = start("generate", LONG, "--raw", "--model", tiny, "--max-tokens", 8)
    out, _ = process.communicate()
    (expected,) = llm.generate(LONG, max_tokens=8)
    assert not expected.text.isascii()
    assert out.decode() == expected.text.encode("ascii", "replace").decode() + "\n"
    assert process.returncode == 0


def test_without_a_model_the_demo_model_answers(tiny, llm, monkeypatch, capsys):
    monkeypatch.setattr("jaxengine.cli.session.demo_model_folder", lambda progress: tiny)
    assert main(["generate", "hello", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == llm.chat(chat(("user", "hello")), max_tokens=3)[0].text + "\n"


@pytest.mark.demo
@pytest.mark.slow
def test_T1_the_demo_model_knows_the_capital_of_france(demo_folder, start):
    process = start("generate", "What is the capital of France?")
    out, err = process.communicate()
    assert process.returncode == 0
    assert out == b"The capital of France is Paris.\n"
    assert err == b""
