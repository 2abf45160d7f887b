"""Streamed text is decoded text, and no piece of it is a broken character."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxengine.text import StreamDecoder, TextError, Tokenizer, stream
from jaxengine.text.pieces import read_piece_rules
from tests.text import toy_tokenizers as toy

BACKENDS = {
    "byte_level": toy.byte_level(),
    "byte_level_with_bos": toy.byte_level(adds_bos=True),
    "sentencepiece": toy.sentencepiece(),
    "sentencepiece_keeping_spaces": toy.sentencepiece(strips=False),
    "metaspace": toy.metaspace(),
    "word_level": toy.word_level(),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
SPELL_ALL = ["byte_level", "byte_level_with_bos", "sentencepiece", "sentencepiece_keeping_spaces"]

every_kind = pytest.mark.parametrize("kind", BACKENDS)
texts = st.text(
    st.sampled_from("aé世😀\u0301 \n�Hello▁<|im_") | st.characters(exclude_categories=["Cs"])
) | st.lists(st.sampled_from(["<two words>", " ", "a", "世"])).map("".join)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    stream = StreamDecoder(tokenizer)
    return [stream.push(token) for token in ids], stream.flush()


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids at all: those of the vocabulary, special ones, and some beyond it."""
    return st.lists(st.integers(0, BACKENDS[kind].get_vocab_size() + 3))


@pytest.mark.parametrize("kind", SPELL_ALL)
@given(text=texts)
def test_case_C18_stream_of_encoded_text_is_what_the_library_decodes_at_once(kind, text):
    ids = BACKENDS[kind].encode(text, add_special_tokens=False).ids
    pieces, rest = streamed(TOKENIZERS[kind], ids)
    expected = BACKENDS[kind].decode(ids)
    assert "".join(pieces) + rest == TOKENIZERS[kind].decode(ids) == expected
    assert rest == ""
    if kind.startswith("byte_level"):
        assert expected == text


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_level"])
@given(data=st.data())
def test_case_C18_stream_of_any_ids_is_what_the_library_decodes_at_once(kind, data):
    ids = data.draw(ids_of(kind))
    pieces, rest = streamed(TOKENIZERS[kind], ids)
    assert "".join(pieces) + rest == TOKENIZERS[kind].decode(ids) == BACKENDS[kind].decode(ids)


@pytest.mark.parametrize("strips", [True, False])
@given(data=st.data())
def test_case_C18_byte_fallback_agrees_with_the_library_but_keeps_whole_characters_in_broken_runs(
    strips, data
):
    kind = "sentencepiece" if strips else "sentencepiece_keeping_spaces"
    ids = data.draw(ids_of(kind) | st.lists(st.sampled_from(byte_tokens("é世😀�a"))))
    pieces, rest = streamed(TOKENIZERS[kind], ids)
    joined = "".join(pieces) + rest
    assert joined == TOKENIZERS[kind].decode(ids)
    library = BACKENDS[kind].decode(ids)
    if "\ufffd" not in library:
        assert joined == library
    else:  # a character kept here is one U+FFFD for each of its bytes there
        assert len(joined.encode()) <= len(library.encode())
        pattern = "".join(f"(?:{re.escape(c)}|\ufffd{{{len(c.encode())}}})" for c in joined)
        assert re.fullmatch(pattern, library)


def byte_tokens(text: str) -> list[int]:
    return [BACKENDS["sentencepiece"].token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


@pytest.mark.parametrize("kind", SPELL_ALL)
@given(text=st.text(st.sampled_from("ab é世😀\u0301")), cut=st.integers(0, 30))
def test_case_C18_a_cut_inside_a_character_shows_only_at_the_end(kind, text, cut):
    """Every push gives whole characters of the text; an incomplete last one waits and is flushed once."""
    ids = BACKENDS[kind].encode(text, add_special_tokens=False).ids[:cut]
    pieces, rest = streamed(TOKENIZERS[kind], ids)
    sent = "".join(pieces)
    assert "\ufffd" not in sent
    assert text.lstrip(" ").startswith(sent.lstrip(" "))
    assert set(rest) <= {"\ufffd"}
    assert len(rest) <= 3


@pytest.mark.parametrize("kind", SPELL_ALL)
def test_case_C18_a_character_comes_with_its_last_byte_and_a_real_replacement_character_does_not_wait(kind):
    backend = BACKENDS[kind]
    stream = StreamDecoder(TOKENIZERS[kind])
    stream.push(backend.encode("a", add_special_tokens=False).ids[-1])
    for character in "�é✓𐍈":
        for token in backend.encode(f"a{character}", add_special_tokens=False).ids:
            last = stream.push(token)
        assert last.endswith(character)


def test_case_C18_a_leading_space_is_the_first_tokens_and_no_later_ones():
    """Three words, each its own piece with a space: one-shot decoding drops the first space only."""
    for kind in ("sentencepiece", "metaspace"):
        ids = BACKENDS[kind].encode("the the Hello", add_special_tokens=False).ids
        pieces, _ = streamed(TOKENIZERS[kind], ids)
        assert pieces == ["the", " the", " Hello"]
    ids = BACKENDS["sentencepiece_keeping_spaces"].encode("the the", add_special_tokens=False).ids
    assert streamed(TOKENIZERS["sentencepiece_keeping_spaces"], ids)[0] == [" the", " the"]


@every_kind
def test_special_and_unknown_tokens_add_nothing_even_inside_a_character(kind):
    backend, tokenizer = BACKENDS[kind], TOKENIZERS[kind]
    ids = backend.encode("a世b" if kind in SPELL_ALL else "hello world", add_special_tokens=False).ids
    special = backend.token_to_id(toy.EOS) if kind != "word_level" else 999
    noisy = [special, *(token for pair in ((token, special, 9999) for token in ids) for token in pair)]
    assert tokenizer.decode(noisy) == tokenizer.decode(ids)


def test_a_flushed_stream_starts_a_new_text():
    stream = StreamDecoder(TOKENIZERS["sentencepiece"])
    first, second, *_ = byte_tokens("😀")
    the = BACKENDS["sentencepiece"].token_to_id("▁the")
    assert [stream.push(the), stream.push(first), stream.push(second)] == ["the", "", ""]
    assert stream.flush() == "\ufffd\ufffd"
    assert stream.flush() == ""
    assert stream.push(the) == "the"


@given(st.lists(st.integers(0, 255), min_size=1, max_size=400))
def test_what_waits_is_bounded_whatever_came_before(bytes_of_ids):
    """The decoder's memory is the incomplete character alone: at most three bytes."""
    tokenizer = TOKENIZERS["byte_level"]
    stream = StreamDecoder(tokenizer)
    for token in bytes_of_ids:
        stream.push(token)
        assert len(stream._utf8.getstate()[0]) <= 3


@every_kind
@given(data=st.data())
def test_case_C18_states_are_values_that_decode_as_the_stream_does(kind, data):
    """Every state, whenever it is used again, gives the same; and the pieces are the decoder's."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(
        ids_of(kind) | st.text(st.sampled_from(" aé世😀")).map(BACKENDS[kind].encode).map(lambda e: e.ids)
    )
    states, pieces = [stream.start(tokenizer)], []
    for token in ids:
        state, text = stream.advance(tokenizer, states[-1], token)
        states.append(state)
        pieces.append(text)
    rest = stream.finish(tokenizer, states[-1])
    assert (pieces, rest) == streamed(tokenizer, ids)
    assert states[0] == stream.start(tokenizer)
    for token, old, new, text in zip(ids, states, states[1:], pieces, strict=False):
        assert stream.advance(tokenizer, old, token) == (new, text)
        assert hash(stream.advance(tokenizer, old, token)[0]) == hash(new)
        assert len(new.incomplete) <= 3
    assert stream.finish(tokenizer, states[-1]) == rest


@every_kind
def test_T1_a_branch_of_a_text_leaves_the_others_alone(kind):
    """Two continuations of one state: each is decoded as if the other hadn't been tried."""
    tokenizer, backend = TOKENIZERS[kind], BACKENDS[kind]
    word, other = ("hello", "big") if kind == "word_level" else ("a", "b")
    first, second = backend.token_to_id(word), backend.token_to_id(other)
    state, begin = stream.advance(tokenizer, stream.start(tokenizer), first)
    for token in (second, first, second):
        _, end = stream.advance(tokenizer, state, token)
        assert begin + end == tokenizer.decode([first, token])


def test_T1_spaces_still_to_drop_are_part_of_the_state():
    """The first token may be a mere space; the one dropped space is then spent."""
    tokenizer = TOKENIZERS["sentencepiece"]
    space = BACKENDS["sentencepiece"].token_to_id("▁")
    begin = stream.start(tokenizer)
    dropped, text = stream.advance(tokenizer, begin, space)
    assert (text, begin.leading_spaces, dropped.leading_spaces) == ("", 1, 0)
    assert stream.advance(tokenizer, dropped, space)[1] == " "


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "},
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(decoder):
    culprit = decoder["decoders"][-1]["type"] if decoder["type"] == "Sequence" else decoder["type"]
    with pytest.raises(TextError, match=f"decodes with {culprit}.*can't be streamed; known are ByteLevel"):
        read_piece_rules(decoder)
