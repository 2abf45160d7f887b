"""What masks let a turn say satisfies its grammar; the oracle is `re`, `jsonschema` or arithmetic."""

import itertools
import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxengine.guidance import Grammar, GuidanceError, Guides
from jaxengine.text import Tokenizer
from tests.jaxengine.guided import (
    ARITHMETIC,
    EOS,
    KINDS,
    TOKENIZER,
    WIDTH,
    allowed,
    cursor,
    fresh,
    masks,
    simulated,
    spelled,
    tokenizer_of,
)
from tests.jaxengine.json_schemas import SCHEMAS
from tests.text import toy_tokenizers as toy


@pytest.fixture(scope="module")
def guides() -> Guides:
    return fresh()


@pytest.fixture(scope="module")
def demo_tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_folder)


@pytest.fixture(scope="module")
def demo_guides(demo_tokenizer: Tokenizer) -> Guides:
    return Guides(demo_tokenizer, [2], 49152)


# What the masks let through.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "pattern",
    [
        "ab*",
        "(the|he|hello)( world)?",
        "[0-9]{2}:[0-9]{2}",
        "[α-ω]{1,3}",
        "世界|😀+",
        "x/y\\\\z",
        "(a|b)*c",
        "a?",
    ],
)
def test_L1_finished_text_matches_the_regular_expression(guides, pattern, seed):
    tokens = simulated(guides, Grammar.regex(pattern), seed)
    assert tokens is not None
    assert re.fullmatch(pattern, TOKENIZER.decode(tokens))


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("pattern", ["(the |Hello |world )+the", "<two words>(, user)?", "[a-z]{3}_[A-Z]"])
def test_L1_finished_text_matches_whatever_the_kind_of_tokenizer(kind, pattern):
    tokenizer = tokenizer_of(kind)
    eos = tokenizer.encode(toy.EOS)[-1:]
    guides = fresh(eos, tokenizer, 400)
    finished = [simulated(guides, Grammar.regex(pattern), seed, eos=eos) for seed in range(4)]
    assert any(finished)
    for tokens in finished:
        assert tokens is None or re.fullmatch(pattern, tokenizer.decode(tokens))


@pytest.mark.parametrize("seed", range(12))
def test_L1_finished_text_derives_from_the_lark_grammar(guides, seed):
    tokens = simulated(guides, Grammar.lark(ARITHMETIC), seed)
    if tokens is None:
        assert seed != 0, "the first seed ends"
        return
    text = TOKENIZER.decode(tokens)
    assert re.fullmatch(r"[0-9+*()]+", text)
    assert eval(text) > 0  # digits and operators only, by the line before


# The library checks the form of a date or time only, so February has 29 days in every year.
FORMATS = jsonschema.FormatChecker(formats=("email", "ipv4", "uuid"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_L1_finished_json_satisfies_its_schema(guides, name):
    """L1, C28: valid JSON, spaced as `json.dumps` spaces it."""
    schema = SCHEMAS[name]
    grammar = Grammar.json_schema(schema)
    finished = [tokens for seed in range(3) if (tokens := simulated(guides, grammar, seed, 1500)) is not None]
    assert finished
    for tokens in finished:
        value = json.loads(TOKENIZER.decode(tokens))
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.demo
@pytest.mark.parametrize("name", SCHEMAS)
def test_L1_finished_json_satisfies_its_schema_with_the_demo_tokenizer(demo_guides, demo_tokenizer, name):
    tokens = next(
        tokens
        for seed in itertools.count()
        if (tokens := simulated(demo_guides, Grammar.json_schema(SCHEMAS[name]), seed, 800, [2])) is not None
    )
    text = demo_tokenizer.decode(tokens)
    jsonschema.validate(json.loads(text), SCHEMAS[name], jsonschema.Draft202012Validator)


def test_case_C28_json_has_no_free_blanks_unless_its_schema_asks_for_them(guides):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    newline, blank = spelled("\n ")
    for tokens in itertools.accumulate([token] for token in spelled('{"a": 7')):
        assert newline not in allowed(guides, Grammar.json_schema(schema), tokens)
    assert {newline, blank}.isdisjoint(allowed(guides, Grammar.json_schema(schema)))
    other_option = Grammar.json_schema(schema | {"x-guidance": {"coerce_one_of": True}})
    assert newline not in allowed(guides, other_option, spelled("{"))
    free = Grammar.json_schema(schema | {"x-guidance": {"whitespace_flexible": True}})
    assert newline in allowed(guides, free, spelled("{"))


def test_L1_spacing_equals_that_of_json_dumps(guides):
    value = {"a": [1, 2, {"b": None}], "c": "d"}
    grammar = Grammar.json_schema({"const": value})
    tokens = spelled(json.dumps(value))
    complete = [guides.is_complete(grammar, tokens[:length]) for length in range(len(tokens) + 1)]
    assert complete == [False] * len(tokens) + [True]


# The tokenizer's table.


@pytest.mark.parametrize("kind", KINDS)
def test_L1_the_library_sees_the_bytes_that_the_tokenizer_gives(kind):
    tokenizer = tokenizer_of(kind)
    table = fresh((), tokenizer, 400)._table
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token, first=False)
        if piece == b"\xff":  # the library's mark of special tokens, and in no text
            continue
        assert table.is_special_token(token) == (piece is None)
        assert piece is None or table.decode_bytes([token]) == piece


@pytest.mark.demo
def test_L1_the_library_sees_the_bytes_of_the_demo_tokenizer(demo_guides, demo_tokenizer):
    for token in range(demo_tokenizer.vocab_size):
        piece = demo_tokenizer.piece(token, first=False)
        assert demo_guides._table.is_special_token(token) == (piece is None)
        assert piece is None or demo_guides._table.decode_bytes([token]) == piece


@pytest.mark.parametrize("kind", KINDS[:3])
@given(text=st.text(st.sampled_from("the Hello world user.,/<|_é")))
def test_L5_text_inside_a_text_is_spelled_without_anything_in_front(kind, text):
    tokenizer = tokenizer_of(kind)
    assert (
        b"".join(tokenizer.piece(token, first=False) for token in tokenizer.encode_within(text))
        == text.encode()
    )


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("text", toy.CONTROL)
def test_L5_the_spelling_of_a_special_token_is_plain_text_inside_a_text(kind, text):
    tokenizer = tokenizer_of(kind)
    assert tokenizer.special_tokens.keys().isdisjoint(tokenizer.encode_within(text))
    assert tokenizer.special_tokens[tokenizer.encode(text)[-1]] == text


def test_L1_special_tokens_and_ids_beyond_the_tokenizer_are_never_allowed(guides):
    """They stay out of a grammar that allows any text at all; EOS ids are in as it may end anywhere."""
    anything = Grammar.regex("(?s:.*)")
    special = set(TOKENIZER.special_tokens)
    beyond = set(range(TOKENIZER.vocab_size, WIDTH))
    assert beyond
    assert allowed(guides, anything) & (special | beyond) == set(EOS)
    everything = Grammar.lark("start: <[*]> <[*]>")
    assert allowed(guides, everything) & (beyond | set(EOS)) == set()


def test_L1_a_lark_grammar_may_name_a_special_token(guides):
    grammar = Grammar.lark(f'start: "a" {toy.START} "b"')
    (start,) = TOKENIZER.encode(toy.START)
    assert allowed(guides, grammar, spelled("a")) == {start}
    assert allowed(guides, grammar, [*spelled("a"), start]) == set(spelled("b"))


def test_case_C6_a_grammar_that_needs_an_eos_inside_is_refused_by_name(guides):
    with pytest.raises(GuidanceError, match="a token that it can't have"):
        allowed(guides, Grammar.lark(f'start: "a" {toy.END} "b"'), spelled("a"))


# The end.


@pytest.mark.parametrize("eos", [(), EOS[:1], EOS, (EOS[0], WIDTH - 1)], ids=["none", "one", "two", "beyond"])
def test_case_C6_every_eos_id_is_allowed_exactly_where_the_grammar_may_end(eos):
    guides = fresh(eos)
    grammar = Grammar.regex("ab?")
    a, b = spelled("ab")
    assert allowed(guides, grammar) & set(EOS) == set()
    assert allowed(guides, grammar, [a]) == {b, *eos}
    assert allowed(guides, grammar, [a, b]) == set(eos)
    complete = [guides.is_complete(grammar, tokens) for tokens in ([], [a], [a, b])]
    assert complete == [False, True, True]


def test_case_C6_an_eos_that_is_no_special_token_is_still_no_text(guides):
    (a,) = spelled("a")
    guides = fresh([a])
    assert a not in allowed(guides, Grammar.regex("[a-c]"))
    with pytest.raises(GuidanceError, match="can't spell 'a'"):
        allowed(guides, Grammar.regex("ab?"))


@pytest.mark.parametrize("drafts", ["a$", "ax", "x", "$", "a$b", "aa"])
def test_case_C6_drafts_leave_the_cursor_as_it_was(guides, drafts):
    """C6: grammar `a`, drafts with an EOS or a wrong token; then the turn goes on as if there had been none."""
    grammar = Grammar.regex("a")
    ids = dict(zip("abx$", [*spelled("abx"), EOS[1]], strict=True))
    a = ids["a"]
    rows = masks(guides, cursor(grammar, [], [ids[letter] for letter in drafts]))
    assert set(np.flatnonzero(rows[0])) == {a}
    for row in rows[1:]:
        assert set(np.flatnonzero(row)) == set(EOS)
    assert allowed(guides, grammar) == {a}
    assert allowed(guides, grammar, [a]) == set(EOS)
