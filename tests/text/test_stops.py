"""Stop strings end a text where a naive search over its decoded text says, and nothing of a match gets out."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxengine.text import TextState, Tokenizer, require_stops, stops, stream
from tests.text import toy_tokenizers as toy

BACKENDS = {
    "byte_level": toy.byte_level(),
    "sentencepiece": toy.sentencepiece(),
    "sentencepiece_keeping_spaces": toy.sentencepiece(strips=False),
    "metaspace": toy.metaspace(),
    "word_level": toy.word_level(),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
BYTE_LEVEL = TOKENIZERS["byte_level"]
POOL = ["a", "b", "the", "he", "ello", "Hello", "▁", "Ġ", "▁the", "Ġthe", "<two words>", "世界", toy.EOS]

every_kind = pytest.mark.parametrize("kind", BACKENDS)


def bytes_of(kind: str, text: str) -> list[int]:
    """`text` spelled with one token a byte."""
    spellings = [f"<0x{byte:02X}>" for byte in text.encode()]
    if kind == "byte_level":
        letters = {BYTE_LEVEL.piece(token, first=False): token for token in range(256)}
        return [letters[bytes([byte])] for byte in text.encode()]
    return [token for spelling in spellings if (token := BACKENDS[kind].token_to_id(spelling)) is not None]


def chained(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def tokens_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids whose text repeats itself: few words, single bytes of characters, and any ids at all."""
    known = [token for text in POOL if (token := BACKENDS[kind].token_to_id(text)) is not None]
    known += bytes_of(kind, "é世�")
    size = BACKENDS[kind].get_vocab_size() + 3
    whole = st.sampled_from(["é", "世", "a世b", "� ", "ab"]).map(lambda text: bytes_of(kind, text))
    one = st.sampled_from(known or [0]) | st.integers(0, size)
    return st.lists(one.map(lambda token: [token]) | whole, max_size=24).map(chained)


def stop_strings(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Stop strings: pieces of `text`, pieces of it that go wrong at their end, and others of its kind."""
    places = st.integers(0, len(text))
    pieces = st.tuples(places, st.integers(1, 9)).map(lambda cut: text[cut[0] : sum(cut)]).filter(bool)
    others = st.text(st.sampled_from("abhel 世�"), min_size=1, max_size=5)
    near = st.tuples(pieces, st.sampled_from("ab �")).map("".join)
    return st.lists(pieces | near | others, max_size=4).map(tuple)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> tuple[list[int], tuple[str, ...]]:
    ids = draw(tokens_of(kind))
    return ids, draw(stop_strings(TOKENIZERS[kind].decode(ids)))


def run(
    tokenizer: Tokenizer, wanted: tuple[str, ...], ids: list[int]
) -> tuple[list[str], str | None, TextState]:
    """The pieces released up to the stop, the stop, and the last state."""
    state, pieces = stops.start(tokenizer), []
    for token in ids:
        step = stops.advance(tokenizer, wanted, state, token)
        pieces.append(step.text)
        state = step.state
        if step.stop is not None:
            return pieces, step.stop, state
    return pieces, None, state


def decoded(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The whole characters of the text after each token."""
    texts, text, state = [], "", stream.start(tokenizer)
    for token in ids:
        state, piece = stream.advance(tokenizer, state, token)
        text += piece
        texts.append(text)
    return texts


def occurrences(text: str, wanted: tuple[str, ...]) -> list[tuple[int, str]]:
    """Every place of every stop string in `text`."""
    return [(begin, stop) for stop in wanted for begin in range(len(text)) if text.startswith(stop, begin)]


def first_match(texts: list[str], wanted: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Tokens up to the match, where it begins, and its stop string: by a search of each whole text."""
    for count, text in enumerate(texts, 1):
        if found := occurrences(text, wanted):
            begin, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            return count, begin, stop
    return None


@every_kind
@given(data=st.data())
def test_K5_case_C2_C18_pieces_joined_are_the_text_before_the_match(kind, data):
    """Joined pieces, the stop string and the number of tokens are those of a search over whole texts."""
    tokenizer = TOKENIZERS[kind]
    ids, wanted = data.draw(cases(kind))
    pieces, stop, state = run(tokenizer, wanted, ids)
    texts = decoded(tokenizer, ids)
    match = first_match(texts, wanted)
    if match is None:
        assert stop is None
        assert "".join(pieces) + stops.finish(tokenizer, state) == tokenizer.decode(ids)
    else:
        count, begin, expected = match
        assert (len(pieces), stop) == (count, expected)
        assert "".join(pieces) == texts[count - 1][:begin]
        assert stops.finish(tokenizer, state) == ""
        assert state == stops.start(tokenizer)


@every_kind
@given(data=st.data())
def test_K5_case_C18_one_stop_string_cuts_the_library_s_text_at_its_first_place(kind, data):
    """With one stop string, tokens play no part: the text is what stands before it in the text decoded at once."""
    words = st.sampled_from(["a", "b", " ", "the", "Hello", "世界", "é", "😀", "\ufffd"])
    ids = BACKENDS[kind].encode("".join(data.draw(st.lists(words))), add_special_tokens=False).ids
    text = BACKENDS[kind].decode(ids)
    wanted = data.draw(stop_strings(text).filter(bool))[0]
    pieces, stop, state = run(TOKENIZERS[kind], (wanted,), ids)
    before, found, _ = text.partition(wanted)
    assert stop == (found or None)
    assert "".join(pieces) + stops.finish(TOKENIZERS[kind], state) == before


@given(
    text=st.text(st.sampled_from("aab世 "), max_size=30),
    wanted=st.lists(st.text(st.sampled_from("aab世 "), min_size=1, max_size=5), max_size=5).map(tuple),
)
@example(text="aaab", wanted=("aab",))
@example(text="abab a", wanted=("abab a", "bab", "b a"))
def test_K5_of_one_byte_tokens_the_match_that_ends_first_wins(text, wanted):
    """Where no token ends two matches at different places, the stop is the first to end in the whole text."""
    pieces, stop, state = run(BYTE_LEVEL, wanted, bytes_of("byte_level", text))
    found = occurrences(text, wanted)
    if found:
        begin, expected = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
        assert (stop, "".join(pieces)) == (expected, text[:begin])
    else:
        assert (stop, "".join(pieces) + stops.finish(BYTE_LEVEL, state)) == (None, text)


@every_kind
@given(data=st.data())
def test_K5_case_C2_after_each_token_exactly_what_can_still_become_a_stop_is_held(kind, data):
    """Held is the longest end of the text that begins a stop string, and no released character is in a match."""
    tokenizer = TOKENIZERS[kind]
    ids, wanted = data.draw(cases(kind))
    texts = decoded(tokenizer, ids)
    sent, state = "", stops.start(tokenizer)
    for token, text in zip(ids, texts, strict=True):
        step = stops.advance(tokenizer, wanted, state, token)
        sent += step.text
        if step.stop is not None:
            assert min(begin for begin, _ in occurrences(text, wanted)) == len(sent)
            break
        begins = [stop[:size] for stop in wanted for size in range(len(stop))]
        held = max((begin for begin in begins if text.endswith(begin)), key=len, default="")
        assert (sent, step.state.held) == (text.removesuffix(held), held)
        state = step.state


@every_kind
@given(data=st.data())
def test_K5_states_are_values(kind, data):
    """A state gives the same however often it is advanced, equal ones have one hash, and no old one changes."""
    tokenizer = TOKENIZERS[kind]
    ids, wanted = data.draw(cases(kind))
    other = data.draw(st.integers(0, BACKENDS[kind].get_vocab_size()))
    state = stops.start(tokenizer)
    for token in ids:
        copy = TextState(stream.StreamState(**vars(state.stream)), state.held)
        step = stops.advance(tokenizer, wanted, state, token)
        stops.advance(tokenizer, wanted, state, other)
        stops.finish(tokenizer, state)
        assert state == copy
        assert hash(state) == hash(copy)
        assert stops.advance(tokenizer, wanted, copy, token) == step
        state = step.state


@every_kind
@given(data=st.data())
def test_case_C2_what_is_kept_doesn_t_grow_with_the_text(kind, data):
    """A text repeated keeps at most one character less than the longest stop string, and at most three bytes."""
    ids, wanted = data.draw(cases(kind))
    longest = max(map(len, wanted), default=1)
    state = stops.start(TOKENIZERS[kind])
    for token in ids * 3:
        state = stops.advance(TOKENIZERS[kind], wanted, state, token).state
        assert len(state.held) < longest
        assert len(state.stream.incomplete) <= 3


def test_case_C2_a_token_late_in_a_text_costs_what_an_early_one_does():
    """After 1000 rounds the state is the one after 10, and it is all that the next token looks at."""
    states = []
    for rounds in (10, 1000):
        _, stop, state = run(BYTE_LEVEL, ("aab", "世界!"), bytes_of("byte_level", "xaa世" * rounds))
        assert stop is None
        states.append(state)
    assert states[0] == states[1]
    assert states[0].held == "世"


def pieces_of(wanted: tuple[str, ...], *words: str) -> tuple[list[str], str | None, str]:
    """Streams words of an invented vocabulary, each one token: pieces, stop, and what is released at the end."""
    model = toy.models.WordLevel({word: place for place, word in enumerate(dict.fromkeys(words))}, words[0])
    backend = toy.Tokenizer(model)
    backend.decoder = toy.decoders.Fuse()
    tokenizer = Tokenizer(backend)
    pieces, stop, state = run(tokenizer, wanted, [backend.token_to_id(word) for word in words])
    return pieces, stop, stops.finish(tokenizer, state)


@pytest.mark.parametrize(
    ("wanted", "words", "expected"),
    [
        (("DEFGHIJ",), ("ABC", "DEF", "G", "HI", "J"), (["ABC", "", "", "", ""], "DEFGHIJ", "")),
        (("DEFGHIJ",), ("ABC", "DEF", "G", "HI", "x"), (["ABC", "", "", "", "DEFGHIx"], None, "")),
        (("DEFGHIJ",), ("ABC", "DEF", "G"), (["ABC", "", ""], None, "DEFG")),
        (("\n\n",), ("one\n", "\ntwo"), (["one", ""], "\n\n", "")),  # ends inside a token
        (("b",), ("abc",), (["a"], "b", "")),  # inside one token
        (("ab", "abc"), ("a", "b", "c"), (["", ""], "ab", "")),  # the shorter ends first
        (("ab", "abc"), ("xabc",), (["x"], "abc", "")),  # one token ends both
        (("ab", "bc"), ("xabc",), (["x"], "ab", "")),
        (("b", "abcd"), ("abc", "d"), (["a"], "b", "")),  # one inside the other: it ends first
        (("c", "abcd"), ("ab", "cd"), (["", ""], "abcd", "")),
        (("aab",), ("a", "a", "a", "b"), (["", "", "a", ""], "aab", "")),
        (("aab",), ("aa", "ab"), (["", "a"], "aab", "")),
        (("abcabd",), ("abcab", "cab", "d"), (["", "abc", ""], "abcabd", "")),
        ((" a",), ("x", " ", "a"), (["x", "", ""], " a", "")),  # begins with a space
        (("e\u0301",), ("e", "\u0301"), (["", ""], "e\u0301", "")),
        (("e",), ("xe\u0301",), (["x"], "e", "")),  # code points match, not shapes
        ((), ("a", "b"), (["a", "b"], None, "")),
    ],
)
def test_case_C2_where_a_stop_ends_and_what_waits_for_it(wanted, words, expected):
    assert pieces_of(wanted, *words) == expected


@pytest.mark.parametrize("place", [2, 5])
def test_case_C4_of_several_accepted_tokens_those_after_the_stop_are_not_looked_at(place):
    """Six tokens of one step, the stop at the third or last place: it is found there, with the text before."""
    words = ["10", "11", "20", "21", "22"]
    words.insert(place, "STOP")
    pieces, stop, rest = pieces_of(("STOP",), *words)
    assert (len(pieces), stop, rest) == (place + 1, "STOP", "")
    assert "".join(pieces) == "".join(words[:place])


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_K5_case_C18_an_incomplete_character_is_no_replacement_character(kind):
    """Cut inside a character the text ends in U+FFFD and no stop; a U+FFFD that it holds is one."""
    tokenizer = TOKENIZERS[kind]
    pieces, stop, state = run(tokenizer, ("\ufffd",), bytes_of(kind, "a世")[:-1])
    assert ("".join(pieces), stop) == ("a", None)
    assert stops.finish(tokenizer, state).strip("\ufffd") == ""
    assert stops.finish(tokenizer, state) != ""
    pieces, stop, _ = run(tokenizer, ("\ufffd",), bytes_of(kind, "a\ufffdb"))
    assert (pieces, stop) == (["a", "", "", ""], "\ufffd")


def test_K5_case_C18_held_text_and_an_incomplete_character_come_out_in_order_at_the_end():
    ids = bytes_of("byte_level", "xa世")[:-1]
    pieces, stop, state = run(BYTE_LEVEL, ("ab",), ids)
    assert ("".join(pieces), stop, stops.finish(BYTE_LEVEL, state)) == ("x", None, "a\ufffd")


def test_K5_case_C18_a_stop_after_a_partial_character_is_found():
    """Bytes that turn out to be no character are U+FFFD before the stop, as in the whole text."""
    ids = [*bytes_of("byte_level", "世")[:2], *bytes_of("byte_level", "END")]
    pieces, stop, _ = run(BYTE_LEVEL, ("END",), ids)
    assert ("".join(pieces), stop) == ("\ufffd", "END")


def test_K5_an_incomplete_character_after_the_match_is_dropped_with_the_rest():
    """A token that ends the match may begin a character; nothing of it is left in the state."""
    ids = bytes_of("byte_level", "ab")
    pieces, stop, state = run(BYTE_LEVEL, ("b",), ids)
    assert (pieces, stop, state) == (["a", ""], "b", stops.start(BYTE_LEVEL))
    merged = next(
        token
        for token in range(BYTE_LEVEL.vocab_size)
        if (piece := BYTE_LEVEL.piece(token, first=False))
        and piece[:3] == "世".encode()
        and 3 < len(piece) < 6
    )
    _, stop, state = run(BYTE_LEVEL, ("世",), [merged])
    assert (stop, stops.finish(BYTE_LEVEL, state)) == ("世", "")


def test_K5_a_space_that_the_text_drops_at_its_start_is_in_no_match():
    """`▁the` begins a text without its space, and holds it anywhere else."""
    the = BACKENDS["sentencepiece"].token_to_id("▁the")
    pieces, stop, _ = run(TOKENIZERS["sentencepiece"], (" the",), [the, the])
    assert (pieces, stop) == (["the", ""], " the")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4))
def test_K5_stop_strings_come_as_one_or_as_a_sequence(wanted):
    assert require_stops("stop", wanted) == require_stops("stop", tuple(wanted)) == tuple(wanted)
    for stop in wanted:
        assert require_stops("stop", stop) == (stop,)


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (None, TypeError, "stop is None; give a string or a list of strings"),
        (5, TypeError, "stop is 5; give a string or a list of strings"),
        (b"ab", TypeError, "stop is b'ab'; give a string or a list of strings"),
        ({"a": 1}, TypeError, "stop is {'a': 1}; give a string or a list of strings"),
        (["a", 5], TypeError, "stop[1] is 5; give a string"),
        ([["a"]], TypeError, "stop[0] is ['a']; give a string"),
        ("", ValueError, "stop is empty and would match anywhere; give at least one character"),
        (["a", ""], ValueError, "stop[1] is empty and would match anywhere; give at least one character"),
        ("a\ud800", ValueError, "stop holds '\\ud800', half of a character; give valid Unicode text"),
        (
            ["a", "\udc80b"],
            ValueError,
            "stop[1] holds '\\udc80', half of a character; give valid Unicode text",
        ),
    ],
)
def test_K5_a_stop_string_that_cannot_be_one_is_named(value, error, sentence):
    with pytest.raises(error) as caught:
        require_stops("stop", value)
    assert str(caught.value) == sentence
