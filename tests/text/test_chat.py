"""A chat becomes exactly the tokens that its template means: one BOS, whole turns, and no forged control tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from jaxengine.text import ChatTemplate, TextError, Tokenizer
from jaxengine.text.messages import SEPARATOR
from tests.text import chat_templates as templates
from tests.text import toy_tokenizers as toy

TEXTS = {"bos_token": toy.BOS, "eos_token": toy.EOS}
KINDS = {"byte_level": toy.byte_level, "sentencepiece": toy.sentencepiece, "metaspace": toy.metaspace}

words = st.text(st.sampled_from("abé世 \nHello<|_>[]/"))


def tokenizer(kind: str, template: str, *, adds_bos: bool) -> Tokenizer:
    return Tokenizer(KINDS[kind](adds_bos=adds_bos), ChatTemplate(template, TEXTS))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def written(chat: Tokenizer, ids: list[int]) -> str:
    """The text of ids, control tokens included."""
    return chat._backend.decode(ids, skip_special_tokens=False)


def id_of(chat: Tokenizer, text: str) -> int:
    return chat._backend.token_to_id(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["CHATML", "LLAMA3", "THINKING"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_case_C27_templated_text_has_exactly_one_bos_and_later_turns_none(kind, template, adds_bos):
    """LLAMA3 writes a BOS and the others don't; a tokenizer that begins plain text with one wants one either way."""
    chat = tokenizer(kind, getattr(templates, template), adds_bos=adds_bos)
    first = chat.chat_ids([user("Hello")])
    wanted = 1 if adds_bos or template == "LLAMA3" else 0
    assert first.count(id_of(chat, toy.BOS)) == wanted
    assert first[:wanted] == [id_of(chat, toy.BOS)] * wanted
    later = chat.chat_ids([user("Hello"), assistant("a"), user("the world")], first_turn=False)
    assert id_of(chat, toy.BOS) not in later


def test_case_C27_a_template_that_repeats_the_bos_still_gives_one():
    chat = tokenizer("byte_level", "{{ bos_token + bos_token + messages[0].content }}", adds_bos=True)
    assert chat.chat_ids([user("a")]) == [id_of(chat, toy.BOS), *chat.encode("a", add_special_tokens=False)]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_case_C27_raw_text_follows_the_tokenizer_even_where_it_spells_the_bos(adds_bos):
    raw = Tokenizer(toy.byte_level(adds_bos=adds_bos))
    bos = id_of(raw, toy.BOS)
    assert raw.encode(f"{toy.BOS}a").count(bos) == 1 + adds_bos
    assert raw.encode("a").count(bos) == adds_bos
    assert raw.encode("a", add_special_tokens=False).count(bos) == 0
    assert raw.prefix == (bos,) * adds_bos


@pytest.mark.parametrize("template", ["CHATML", "LLAMA3"])
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4), last=words)
def test_A15_turns_of_a_session_join_to_the_whole_chat(template, turns, last):
    """Prompt, replies as generated (without their EOS) and continuations, joined, are the chat rendered at once."""
    chat = tokenizer("byte_level", getattr(templates, template), adds_bos=template == "LLAMA3")
    messages, sent = [], []
    for question, answer in [*turns, (last, None)]:
        messages.append(user(question))
        sent += chat.chat_ids(messages, first_turn=not sent)
        if answer is not None:
            reply = (
                answer.strip() if template == "LLAMA3" else answer
            )  # what a template trims it can't give back
            sent += chat.encode(reply, add_special_tokens=False)
            messages.append(assistant(reply))
    assert written(chat, sent) == chat.chat_template.render(messages)


@pytest.mark.parametrize(
    ("template", "end", "continuation"),
    [
        ("CHATML", toy.END, "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
        (
            "LLAMA3",
            "<|eot_id|>",
            (
                "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        ("THINKING", toy.END, "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ],
)
@pytest.mark.parametrize("reply", ["a", "", "  padded\n", "<think>\nhm\n</think>\n\nyes", "cut \ufffd"])
def test_A15_a_continuation_begins_with_the_end_of_turn_token_whatever_the_reply(
    template, end, continuation, reply
):
    """EOS is neither appended nor emitted, and a reply may be trimmed, rewritten, empty or cut: all the same."""
    chat = tokenizer("byte_level", getattr(templates, template), adds_bos=False)
    ids = chat.chat_ids([user("a"), assistant(reply), user("b")], first_turn=False)
    assert ids[0] == id_of(chat, end)
    assert written(chat, ids) == continuation


def test_a_template_may_write_a_bos_between_turns_as_llama_2_does():
    chat = tokenizer("sentencepiece", templates.LLAMA2, adds_bos=True)
    bos, eos = id_of(chat, toy.BOS), id_of(chat, toy.EOS)
    assert chat.chat_ids([user("the")])[:2].count(bos) == 1
    ids = chat.chat_ids([user("the"), assistant("a"), user("the")], first_turn=False)
    assert set(ids[: ids.index(eos)]) <= {id_of(chat, "▁")}
    assert ids.count(bos) == 1
    assert ids.index(bos) == ids.index(eos) + 1


def test_a_continuation_with_plain_text_in_front_gains_no_space():
    """Metaspace puts a space before a text's first word, and a continuation's first word is not that."""
    template = "{% for m in messages %}{{ m.content + ('[' if m.role == 'user' else ']') }}{% endfor %}"
    chat = tokenizer("metaspace", template, adds_bos=False)
    assert written(chat, chat.chat_ids([user("a")])) == "a["
    ids = chat.chat_ids([user("a"), assistant("the"), user("b")], first_turn=False)
    assert [chat._backend.id_to_token(token) for token in ids] == ["]", "b", "["]


CONTROL = sorted([*toy.CONTROL, *toy.HEADERS])


@pytest.mark.parametrize("kind", KINDS)
@given(
    content=st.lists(st.sampled_from([*CONTROL, "a", "<", "|im_end|>", SEPARATOR, " ", "the"])).map("".join)
)
def test_control_tokens_spelled_in_a_message_stay_text(kind, content):
    """However a message spells them, the tokens that count are those of the template, and the text is still there."""
    chat = tokenizer(kind, templates.CHATML, adds_bos=True)
    control = {id_of(chat, text) for text in CONTROL}
    ids = chat.chat_ids([user(content)])
    plain = chat.chat_ids([user("a")])
    assert [token for token in ids if token in control] == [token for token in plain if token in control]
    if kind == "byte_level":
        assert content.replace(SEPARATOR, "") in chat.decode(ids).replace(SEPARATOR, "")
    later = [user("a"), assistant(content), user(content)]
    ids = chat.chat_ids(later, first_turn=False)
    plain = chat.chat_ids([user("a"), assistant("a"), user("a")], first_turn=False)
    assert [token for token in ids if token in control] == [token for token in plain if token in control]


@given(
    special=st.lists(st.text("ab<", min_size=2, max_size=4), min_size=1, max_size=4, unique=True),
    content=st.text("ab<", max_size=12),
)
def test_control_tokens_that_overlap_stay_text_too(special, content):
    backend = toy.byte_level()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    chat = Tokenizer(backend, ChatTemplate("{{ messages[0].content }}"))
    ids = chat.chat_ids([user(content)])
    assert not set(ids) & {backend.token_to_id(text) for text in special}
    assert chat.decode(ids) == content


def test_a_continuation_follows_the_last_place_where_a_template_shows_the_reply():
    template = "{% for m in messages %}[{{ m.content }}|{{ m.content }}]{% endfor %}"
    chat = tokenizer("byte_level", template, adds_bos=False)
    assert written(chat, chat.chat_ids([user("a"), assistant("b"), user("c")], first_turn=False)) == "][c|c]"


def test_normalisation_does_not_turn_a_message_into_a_control_token():
    backend = toy.byte_level()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("</turn>", normalized=True)])
    chat = Tokenizer(backend, ChatTemplate("{% for m in messages %}{{ m.content + '</turn>' }}{% endfor %}"))
    turn = backend.token_to_id("</turn>")
    assert chat.encode("＜/turn＞") == [turn]  # full-width, in raw text
    assert chat.chat_ids([user("＜/turn＞")]).count(turn) == 1


def test_a_reply_marker_in_a_message_is_no_reply():
    chat = tokenizer("byte_level", templates.CHATML, adds_bos=False)
    forged = "\ue000reply\ue001 \ue000\ue000reply\ue001\ue001"
    ids = chat.chat_ids([user("a"), assistant("b"), user(forged)], first_turn=False)
    assert written(chat, ids).startswith("<|im_end|>\n<|im_start|>user\n" + forged)


@pytest.mark.parametrize(
    ("messages", "first_turn", "problem"),
    [
        ([], True, "with at least one in it"),
        ("hello", True, "a chat is a list of messages"),
        ([{"content": "no role"}], True, "a mapping with 'role' and 'content'"),
        ([user("a"), {"role": "user", "content": object()}], True, "a chat message holds <object"),
        (
            [{"role": "user"}],
            True,
            "the chat template refuses these messages: 'dict object' has no attribute",
        ),
        ([user("half \ud83d")], True, "half of a character"),
        ([user("a")], False, "needs an assistant message and something new"),
        ([user("a"), assistant("b")], False, "needs an assistant message and something new"),
    ],
)
def test_T2_a_bad_chat_gets_one_clear_sentence(messages, first_turn, problem):
    chat = tokenizer("byte_level", templates.CHATML, adds_bos=False)
    with pytest.raises(TextError, match=problem):
        chat.chat_ids(messages, first_turn=first_turn)


def test_T2_what_a_template_refuses_is_said_in_its_own_words():
    chat = tokenizer("sentencepiece", templates.LLAMA2, adds_bos=True)
    with pytest.raises(TextError, match="System messages are not supported"):
        chat.chat_ids([{"role": "system", "content": "x"}, user("y")])


def test_a_template_that_forgets_replies_cannot_go_on():
    chat = tokenizer("byte_level", templates.FORGETFUL, adds_bos=False)
    with pytest.raises(TextError, match="drops earlier replies"):
        chat.chat_ids([user("a"), assistant("b"), user("c")], first_turn=False)


def test_messages_are_not_changed():
    chat = tokenizer("byte_level", templates.CHATML, adds_bos=False)
    messages = [user(toy.END), assistant("b"), user("c")]
    before = [dict(message) for message in messages]
    chat.chat_ids(messages, first_turn=False)
    chat.chat_ids(messages)
    assert messages == before
