"""`jaxengine chat` talks over several turns on one resident request."""

import contextlib
import io
import re
import signal
import subprocess

import pytest

import jaxengine as je
from jaxengine.cli import main
from jaxengine.cli.session import engine_for
from jaxengine.guidance import GuidanceError, Guides
from jaxengine.text import Tokenizer
from tests.cli.tiny_model import CONTEXT, variant

LONG = "the quick"  # the tiny model doesn't end its answer to this by itself


def chat(monkeypatch, capsys, tiny, lines, *words):
    """Status, standard output and standard error of a chat whose input is `lines`."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["chat", "--model", str(tiny), *words])
    return status, *capsys.readouterr()


def replies_on_one_request(folder, lines, max_tokens):
    """The same turns by hand: first the whole prompt, then what the template puts after each reply."""
    tokenizer = Tokenizer.from_folder(folder)
    messages, replies = [], []
    with engine_for(je.load_model(folder), CONTEXT) as engine:
        request = engine.create_request()
        for line in lines:
            messages.append({"role": "user", "content": line})
            ids = tokenizer.chat_ids(messages, first_turn=not replies)
            request.begin_turn(ids, je.TurnOptions(max_tokens))
            tokens = []
            while engine.has_pending_requests():
                tokens += [event.token for event in engine.run() if je.EngineEventFlags.TOKEN in event.flags]
            replies.append(tokenizer.decode(tokens))
            messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def test_A9_turns_continue_one_resident_request(tiny, monkeypatch, capsys):
    lines = ["hello", "x y z", "12"]
    status, out, _ = chat(monkeypatch, capsys, tiny, lines, "--max-tokens", "5")
    assert status == 0
    assert out == "".join(f"{reply}\n" for reply in replies_on_one_request(tiny, lines, 5))


def test_case_C27_a_later_turn_begins_with_the_end_of_turn_and_no_second_system_message(
    tiny, monkeypatch, capsys
):
    words = ("--max-tokens", "2", "--show-ids")
    _, _, err = chat(monkeypatch, capsys, tiny, ["hello", "x"], *words)
    first, second = [
        line.split(": ")[1].split() for line in err.splitlines() if line.startswith("prompt ids")
    ]
    tokenizer = Tokenizer.from_folder(tiny)
    end = tokenizer.encode("<|im_end|>")[0]
    assert int(second[0]) == end
    assert "tiny" in tokenizer.decode(map(int, first))
    assert "tiny" not in tokenizer.decode(map(int, second))


def test_exit_blank_lines_and_the_end_of_input(tiny, monkeypatch, capsys):
    one = replies_on_one_request(tiny, ["hello"], 3)[0] + "\n"
    for lines in (["", "hello", "  ", "/exit", "never"], ["hello"], ["/exit"]):
        status, out, _ = chat(monkeypatch, capsys, tiny, lines, "--max-tokens", "3")
        assert (status, out) == (0, one if "hello" in lines else "")


def test_T2_a_message_that_does_not_fit_is_refused_and_the_chat_goes_on(tiny, monkeypatch, capsys):
    lines = ["x" * 100, "hello"]
    status, out, err = chat(
        monkeypatch, capsys, tiny, lines, "--max-tokens", "3", "--max-session-tokens", "100"
    )
    assert status == 1
    assert "this message is refused" in err
    assert "of at most 100; leave room for at least one generated token" in err
    assert out == replies_on_one_request(tiny, ["hello"], 3)[0] + "\n"


def test_T2_L3_a_reply_whose_grammar_fails_is_told_and_the_chat_goes_on(tiny, monkeypatch, capsys):
    """The mask of the first message is given up; the second message is answered by the same request."""
    masks = []
    real = Guides.fill

    def fill(self, *arguments):
        masks.append(arguments)
        if len(masks) == 2:  # the first one was made ahead
            raise GuidanceError("the grammar grew too large")
        real(self, *arguments)

    monkeypatch.setattr(Guides, "fill", fill)
    status, out, err = chat(monkeypatch, capsys, tiny, ["hello", "again"], "--regex", "[ab]{3}")
    assert status == 1
    assert err.startswith(
        "jaxengine: this reply failed: the grammar of request 1 can't go on: the grammar grew"
    )
    assert err.count("\n") == 1
    assert re.fullmatch("\n[ab]{3}\n", out)


def test_T2_an_engine_that_failed_for_good_ends_the_chat(tiny, monkeypatch, capsys):
    with je.inject_fault(je.Stage.EXECUTE, RuntimeError("the device is on fire")):
        status, _, err = chat(monkeypatch, capsys, tiny, ["hello", "again"])
    assert status == 1
    assert err.startswith("jaxengine: error: generation failed: ")
    assert err.count("\n") == 1


def test_A5_a_chat_that_reached_its_limit_says_so(tiny, monkeypatch, capsys):
    status, out, err = chat(monkeypatch, capsys, tiny, [LONG, "more"], "--max-session-tokens", "60")
    assert status == 1
    assert out.count("\n") >= 1
    assert (
        "the chat has reached its 60 tokens; start a new one, or allow more with --max-session-tokens" in err
    )


def test_A8_ctrl_c_stops_the_reply_and_keeps_the_chat(tiny, start):
    process = start("chat", "--model", tiny, "--max-tokens", 900)
    process.stdin.write(LONG.encode() + b"\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"jaxengine: interrupted; the chat goes on\n"
    out, err = process.communicate(b"hello\n/exit\n", timeout=120)
    assert process.returncode == 0
    assert err == b"" or err == b"jaxengine: stopped at --max-tokens 900\n"
    assert out.decode().count("\n") >= 2


def test_T2_ctrl_c_at_the_prompt_leaves(tiny, start):
    """After the reply's last newline the command waits for the next line."""
    process = start("chat", "--model", tiny, "--max-tokens", 1)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stderr.readline() == b"jaxengine: stopped at --max-tokens 1\n"
    # Its input stays open meanwhile, since an end of the input would let it leave as well. One that comes when the read
    # is about to begin is seen only when the read is over (a race in any Python program), so it is sent again.
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    assert process.returncode == 130
    assert process.stderr.read() == b"\njaxengine: interrupted\n"


def test_T2_input_that_is_no_text_is_told(tiny, start):
    process = start("chat", "--model", tiny, "--max-tokens", 1)
    _, err = process.communicate(b"\xff\xfe\n")
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert b"jaxengine: " in err


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_system_message_comes_first_and_once(tiny, monkeypatch, capsys, system):
    words = ("--max-tokens", "1", "--show-ids", *(("--system", system) if system else ()))
    _, _, err = chat(monkeypatch, capsys, tiny, ["hello", "x"], *words)
    ids = [line.split(": ")[1].split() for line in err.splitlines() if line.startswith("prompt ids")]
    tokenizer = Tokenizer.from_folder(tiny)
    texts = [tokenizer.decode(map(int, turn)) for turn in ids]
    assert [text.count("system") for text in texts] == [1, 0]
    assert ("Be brief." in texts[0]) == bool(system)


def test_a_template_file_may_shape_the_chat(tiny, tmp_path, monkeypatch, capsys):
    folder = variant(tiny, tmp_path / "plain")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    _, _, err = chat(monkeypatch, capsys, folder, ["a", "b"], "--max-tokens", "1", "--show-ids")
    tokenizer = Tokenizer.from_folder(folder)
    ids = [line.split(": ")[1].split() for line in err.splitlines() if line.startswith("prompt ids")]
    assert [tokenizer.decode(map(int, turn)) for turn in ids] == ["[a]", "][b]"]
