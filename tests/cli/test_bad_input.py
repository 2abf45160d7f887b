"""SPEC T2 and case C19: whatever is wrong with a command comes out as one sentence and a nonzero status."""

import json
import os
import subprocess
import sys

import pytest

from jaxengine import sizing
from jaxengine.cli import main
from jaxengine.demo import DemoModelError
from tests.cli.conftest import ROOT
from tests.cli.tiny_model import variant


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("generate", "the following arguments are required: prompt"),
        ("generate a --wat", "unrecognized arguments: --wat"),
        ("generate a --max-tokens 0", "'0' is no whole number from 1"),
        ("generate a --max-tokens -1", "'-1' is no whole number from 1"),
        ("generate a --max-tokens many", "'many' is no whole number from 1"),
        ("generate a --max-tokens 2147483648", "'2147483648' is no whole number from 1 to 2147483647"),
        (f"generate a --max-tokens {'9' * 5000}", "99999...' is no whole number from 1"),
        ("generate a --temperature -1", "--temperature is -1.0; give a "),
        ("generate a --temperature nan", "--temperature is nan; give a "),
        ("generate a --temperature inf", "--temperature is inf; give a "),
        ("generate a --temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("generate a --top-k -1", "--top-k is -1; give a "),
        ("generate a --top-p 1.5", "--top-p is 1.5; give a "),
        ("generate a --seed -1", "--seed is -1; give a "),
        ("generate a --min-p 2", "--min-p is 2.0; give a "),
        ("chat --repetition-penalty 0", "--repetition-penalty is 0.0; give a "),
        ("generate a --presence-penalty 3", "--presence-penalty is 3.0; give a "),
        ("generate a --frequency-penalty -3", "--frequency-penalty is -3.0; give a "),
        ("generate a --no-repeat-ngram -1", "--no-repeat-ngram is -1; give a "),
        ("generate a --logit-bias 5", "argument --logit-bias: '5' is no ID=VALUE, as in 42=-1.5"),
        ("generate a --logit-bias x=1", "argument --logit-bias: 'x=1' is no ID=VALUE"),
        ("generate a --logit-bias=-1=1", "a token of --logit-bias is -1; give a "),
        ("generate a --logit-bias 5=nan", "--logit-bias[5] is nan; give a finite value"),
        (
            "generate a --logit-bias 5=1 --logit-bias 5=2",
            "--logit-bias names token 5 twice; give it one value",
        ),
        ("generate a --stop=", "--stop[0] is empty and would match anywhere; give at least one character"),
        ("generate a --stop-token -1", "a token of --stop-token is -1; give a "),
        ("chat --stop-token x", "argument --stop-token: invalid int value: 'x'"),
        ("generate a --min-new-tokens -1", "--min-new-tokens is -1; give a "),
        ("generate a --json-schema {", "the JSON schema can't be used: "),
        ("chat --json-schema /nowhere.json", "/nowhere.json can't be read: No such file or directory"),
        ("generate a --regex (", "the regular expression can't be used: "),
        ("generate a --regex=", "the regular expression is empty; give one that has something to say"),
        ("generate a --lark /nowhere", "/nowhere can't be read: No such file or directory"),
        ("generate a --lark /", "/ can't be read: Is a directory"),
        ("generate a --regex a --lark b", "argument --lark: not allowed with argument --regex"),
        ("generate a --drafts 0", "argument --drafts: '0' is no whole number from 1"),
        ("generate a --weights heavy", "argument --weights: invalid choice: 'heavy'"),
        ("generate a --raw --system x", "--system needs the chat template that --raw switches off"),
        ("chat --max-session-tokens 99999999999999", "'99999999999999' is no whole number from 1"),
        ("generate a --n 0", "'0' is no whole number from 1"),
        ("generate a --n 1.5", "'1.5' is no whole number from 1"),
        ("generate a --logprobs 21", "--logprobs is 21"),
        ("generate a --logprobs=-1", "--logprobs is -1"),
        ("generate a --logprobs x", "argument --logprobs: invalid int value: 'x'"),
        ("chat --logprobs 1", "unrecognized arguments: --logprobs 1"),
        ("chat --max-session-tokens 0", "'0' is no whole number from 1"),
        ("inspect", "the following arguments are required: FOLDER"),
    ],
)
def test_T2_a_wrong_option_is_status_2_and_one_sentence(words, problem, capsys):
    assert main(words.split()) == 2
    assert_one_sentence(capsys, problem)


@pytest.mark.parametrize("command", [["generate", "a", "--model"], ["chat", "--model"], ["inspect"]])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "doesn't exist"),
        ("file", "is a file; give the folder that holds genai_config.json"),
        ("empty", "has no genai_config.json"),
        ("broken_config", "isn't valid JSON"),
        ("no_graph", "model.onnx"),
    ],
)
def test_T2_a_bad_folder_is_named(tiny, tmp_path, command, name, problem, capsys):
    folder = tmp_path / name
    match name:
        case "file":
            folder.write_text("")
        case "empty":
            folder.mkdir()
        case "broken_config":
            variant(tiny, folder)
            (folder / "genai_config.json").write_text("{")
        case "no_graph":
            variant(tiny, folder, drop=("model.onnx",))
    assert main([*command, str(folder)]) == 1
    assert_one_sentence(capsys, problem, str(folder))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("no_data", "model.onnx.data"),
        ("short_data", "model.onnx.data"),
        ("no_tokenizer", "tokenizer.json can't be read"),
        ("broken_tokenizer", "tokenizer.json is no tokenizer"),
        ("beams", "search.num_beams of the model folder is 4"),
    ],
)
def test_T2_a_damaged_folder_is_named_by_what_runs_it(tiny, tmp_path, damage, problem, capsys):
    folder = variant(tiny, tmp_path / damage, {"num_beams": 4} if damage == "beams" else None)
    match damage:
        case "no_data":
            (folder / "model.onnx.data").unlink()
        case "short_data":
            os.truncate(folder / "model.onnx.data", 1000)
        case "no_tokenizer":
            (folder / "tokenizer.json").unlink()
        case "broken_tokenizer":
            (folder / "tokenizer.json").write_text("{}")
    assert main(["generate", "a", "--model", str(folder)]) == 1
    assert_one_sentence(capsys, problem)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["generate", ""], "the prompt is empty; give at least one character"),
        (["generate", "\udcff", "--raw"], "half of a character; give valid Unicode text"),
        (["generate", "\udcff"], "half of a character; give valid Unicode text"),
        (["generate", "x" * 1024, "--raw"], "1024 tokens of at most 1024"),
    ],
)
def test_T2_a_bad_prompt_is_status_1_and_one_sentence(tiny, words, problem, capsys):
    assert main([*words, "--model", str(tiny)]) == 1
    assert_one_sentence(capsys, problem)


def test_T2_a_chat_needs_a_template_and_a_limit_within_the_models(tiny, tmp_path, capsys):
    plain = variant(tiny, tmp_path / "plain", drop=("tokenizer_config.json", "chat_template.jinja"))
    assert main(["chat", "--model", str(plain)]) == 1
    assert_one_sentence(capsys, "has no chat template, so it can't chat")
    assert main(["chat", "--model", str(tiny), "--max-session-tokens", "1025"]) == 1
    assert_one_sentence(
        capsys, "--max-session-tokens is 1025; this model allows at most 1024 tokens a session"
    )


@pytest.mark.parametrize("option", ["--logit-bias=99999=1", "--stop-token=99999"])
@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
def test_T2_a_token_that_the_model_does_not_have_is_named(tiny, command, option, capsys):
    assert main([*command, "--model", str(tiny), option]) == 1
    name = option.rpartition("=")[0].partition("=")[0]
    assert_one_sentence(capsys, f"{name} names token 99999; the vocabulary has ids up to ")


def test_T2_a_grammar_and_no_eos_exclude_each_other(tiny, capsys):
    assert main(["generate", "a", "--model", str(tiny), "--regex", "a", "--ignore-eos"]) == 1
    assert_one_sentence(capsys, "a grammar ends with an EOS, and this turn has none")


def test_case_C19_a_bad_search_value_of_the_folder_is_named(tiny, tmp_path, capsys):
    for value in (7, "most"):
        folder = variant(tiny, tmp_path / str(value), {"top_p": value})
        assert main(["generate", "a", "--temperature", "1", "--model", str(folder)]) == 1
        assert_one_sentence(capsys, "search.top_p of the model folder is", str(value))


def test_T2_a_refusing_template_says_why(tiny, tmp_path, capsys):
    folder = variant(tiny, tmp_path / "refusing")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no systems here') }}")
    assert main(["generate", "a", "--system", "b", "--model", str(folder)]) == 1
    assert_one_sentence(capsys, "the chat template refuses these messages: no systems here")


def test_case_C19_all_that_is_unsupported_is_listed_before_weights_load(tiny, tmp_path, capsys):
    """Two operators renamed to unknown ones, and no weights at all: both are told, by name, in one sentence."""
    import onnx

    folder = variant(tiny, tmp_path / "unknown", drop=("model.onnx.data",))
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    first = next(node for node in graph.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    last = graph.graph.node[-1]
    first.op_type, last.op_type = "Frobnicate", "Twiddle"
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    assert main(["generate", "a", "--model", str(folder)]) == 1
    assert_one_sentence(capsys, "Frobnicate", "Twiddle", first.name, last.name)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["unsupported"]) == 2


def test_T2_a_demo_model_that_cannot_be_made_says_why(monkeypatch, capsys):
    def fail(progress):
        raise DemoModelError("the wheel can't be downloaded; give --model FOLDER")

    monkeypatch.setattr("jaxengine.cli.session.demo_model_folder", fail)
    assert main(["generate", "a"]) == 1
    assert_one_sentence(capsys, "the wheel can't be downloaded")


def test_T2_the_command_itself_leaves_no_traceback(start):
    """The same through a process: the status reaches the shell, and nothing else is printed."""
    process = start("generate", "a", "--model", "/nowhere")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err == b"jaxengine: error: The model folder /nowhere doesn't exist.\n"


@pytest.mark.parametrize(
    ("words", "redirected", "problem"),
    [
        ("generate hi", ">&-", "standard output is closed"),
        ("chat", "<&-", "standard input is closed"),
        ("generate hi --max-tokens 2", ">/dev/full", "No space left on device"),
        ("inspect", ">/dev/full", "No space left on device"),
    ],
)
def test_T2_streams_that_take_nothing_are_told_in_one_sentence(tiny, words, redirected, problem):
    """Closed by the caller, or with a full disk behind them."""
    model = tiny if words == "inspect" else f"--model {tiny}"
    command = f"exec {sys.executable} -m jaxengine.cli {words} {model} {redirected}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("jaxengine: error: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_T2_an_inspection_that_nobody_reads_ends_as_by_a_broken_pipe(tiny, start, form):
    process = start("inspect", tiny, *form)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")


def test_T2_a_platform_that_jax_does_not_have_is_one_sentence(tiny):
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    command = [sys.executable, "-m", "jaxengine.cli", "generate", "a", "--model", str(tiny)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("jaxengine: error: JAX can't start: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["--help", "generate --help", "chat --help", "inspect --help", "verify --help", "--version"]
)
def test_asking_for_help_is_no_error(words, capsys):
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert out
    assert err == ""


def test_help_tells_where_sampling_defaults_come_from(capsys):
    main(["generate", "--help"])
    assert "search section of the folder's genai_config.json" in " ".join(capsys.readouterr().out.split())


def assert_one_sentence(capsys, *parts):
    """Nothing on standard output; one line on standard error that holds all `parts` and begins as errors do."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxengine: error: ")
    assert err.count("\n") == 1
    assert not [part for part in parts if part not in err]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_D6_T2_a_cache_that_does_not_fit_is_one_sentence(tiny, monkeypatch, capsys, command):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 1000)
    assert main([command, *["a"] * (command == "generate"), "--model", str(tiny)]) == 1
    assert_one_sentence(capsys, "the memory doesn't hold a KV cache of", "tokens; ask for fewer tokens")
