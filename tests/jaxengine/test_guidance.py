"""Grammars as values: what the masks let a turn say satisfies the grammar, and no cursor can disturb another.

The oracle for texts is `re` and `jsonschema`; for masks it is a fresh `Guides`, which has no cache to be wrong in.
"""

import concurrent.futures
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine import guidance
from jaxengine.guidance import Cursor, Grammar, GuidanceError, Guides
from jaxengine.text import TextError, Tokenizer
from tests.jaxengine.json_schemas import SCHEMAS
from tests.text import toy_tokenizers as toy

WIDTH = 330  # wider than the toy tokenizer, and no multiple of 32
KINDS = [toy.byte_level, toy.sentencepiece, toy.metaspace, toy.word_level]


def tokenizer_of(kind=toy.byte_level) -> Tokenizer:
    return Tokenizer(kind())


TOKENIZER = tokenizer_of()
EOS = (TOKENIZER.encode(toy.EOS)[0], TOKENIZER.encode(toy.END)[0])


def fresh(eos: Sequence[int] = EOS, tokenizer: Tokenizer = TOKENIZER, width: int = WIDTH) -> Guides:
    return Guides(tokenizer, eos, width)


@pytest.fixture(scope="module")
def guides() -> Guides:
    return fresh()


@pytest.fixture(scope="module")
def demo_tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_folder)


@pytest.fixture(scope="module")
def demo_guides(demo_tokenizer: Tokenizer) -> Guides:
    return Guides(demo_tokenizer, [2], 49152)


def cursor(grammar: Grammar, tokens: Sequence[int] = (), drafts: Sequence[int] = ()) -> Cursor:
    return Cursor(grammar, np.array(tokens, np.int32), np.array(drafts, np.int32))


def masks(guides: Guides, *cursors: Cursor) -> np.ndarray:
    """bool[rows, vocab_size]."""
    rows = sum(1 + len(each.drafts) for each in cursors)
    out = np.full((rows, -(-guides.vocab_size // 32)), 0xDEADBEEF, np.uint32)
    guides.fill(cursors, out)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert not bits[:, guides.vocab_size :].any()
    return bits[:, : guides.vocab_size]


def allowed(guides: Guides, grammar: Grammar, tokens: Sequence[int] = ()) -> set[int]:
    return set(np.flatnonzero(masks(guides, cursor(grammar, tokens))[0]).tolist())


def simulated(
    guides: Guides, grammar: Grammar, seed: int, most: int = 400, eos: Sequence[int] = EOS
) -> list[int] | None:
    """A turn of random allowed tokens without the EOS id that ended it; None if it was cut.

    EOS is taken as soon as it is allowed in half of the turns, so that endless grammars end.
    """
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(guides, grammar, tokens)
        ends = choices & set(eos)
        assert bool(ends) == guides.is_complete(grammar, tokens)
        assert ends in (set(), set(eos))
        if ends and (choices == ends or rng.random() < 0.5):
            return tokens
        tokens.append(int(rng.choice(sorted(choices - ends))))
    return None


def spelled(text: str) -> list[int]:
    """One token a byte: a spelling that no tokenizer would choose."""
    bytes_of = {TOKENIZER.piece(token, first=False): token for token in range(TOKENIZER.vocab_size)}
    return [bytes_of[bytes([byte])] for byte in text.encode()]


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


ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


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


def test_C28_json_has_no_free_blanks_unless_its_schema_asks_for_them(guides):
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


def test_C6_a_grammar_that_needs_an_eos_inside_is_refused_by_name(guides):
    with pytest.raises(GuidanceError, match="a token that it can't have"):
        allowed(guides, Grammar.lark(f'start: "a" {toy.END} "b"'), spelled("a"))


# The end.


@pytest.mark.parametrize("eos", [(), EOS[:1], EOS, (EOS[0], WIDTH - 1)], ids=["none", "one", "two", "beyond"])
def test_C6_every_eos_id_is_allowed_exactly_where_the_grammar_may_end(eos):
    guides = fresh(eos)
    grammar = Grammar.regex("ab?")
    a, b = spelled("ab")
    assert allowed(guides, grammar) & set(EOS) == set()
    assert allowed(guides, grammar, [a]) == {b, *eos}
    assert allowed(guides, grammar, [a, b]) == set(eos)
    complete = [guides.is_complete(grammar, tokens) for tokens in ([], [a], [a, b])]
    assert complete == [False, True, True]


def test_C6_an_eos_that_is_no_special_token_is_still_no_text(guides):
    (a,) = spelled("a")
    guides = fresh([a])
    assert a not in allowed(guides, Grammar.regex("[a-c]"))
    with pytest.raises(GuidanceError, match="can't spell 'a'"):
        allowed(guides, Grammar.regex("ab?"))


@pytest.mark.parametrize("drafts", ["a$", "ax", "x", "$", "a$b", "aa"])
def test_C6_drafts_leave_the_cursor_as_it_was(guides, drafts):
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


# Cursors are values.

GRAMMARS = [
    Grammar.regex("(the|he|hello)*( world)?"),
    Grammar.json_schema({"type": "array", "items": {"enum": ["the", "world", "user"]}, "maxItems": 3}),
    Grammar.lark(ARITHMETIC),
    Grammar.regex("[a-z世界]{0,6}"),
    Grammar.lark("start: word+\nword[max_tokens=3]: /[a-c ]+/"),
]


def some_turn(guides: Guides, grammar: Grammar, seed: int, length: int) -> list[int]:
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < length and (choices := sorted(allowed(guides, grammar, tokens) - set(EOS))):
        tokens.append(int(rng.choice(choices)))
    return tokens


TURNS = [[some_turn(fresh(), grammar, seed, 8) for seed in range(3)] for grammar in GRAMMARS]
PLACES = st.tuples(
    st.integers(0, len(GRAMMARS) - 1), st.integers(0, 2), st.integers(0, 8), st.integers(0, 4), st.booleans()
)


def placed(kind: int, turn: int, length: int, drafts: int, spoiled: bool) -> Cursor:
    """Some way into a turn, with its next tokens as drafts, the last of them perhaps another one."""
    tokens = TURNS[kind][turn]
    proposed = tokens[length : length + drafts]
    if spoiled and proposed:
        proposed[-1] = EOS[0] if drafts % 2 else spelled("Z")[0]
    return cursor(GRAMMARS[kind], tokens[:length], proposed)


@settings(max_examples=40)
@given(
    calls=st.lists(st.lists(PLACES, min_size=1, max_size=4), min_size=1, max_size=6),
    capacity=st.integers(0, 9),
)
def test_L2_any_order_of_cursors_gives_the_masks_of_a_fresh_matcher(guides, calls, capacity):
    """L2, C6: ahead, back, forked, equal and evicted cursors, with drafts and without."""
    reference = fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guidance, "_SPARE_MATCHERS", capacity)
        patch.setattr(guidance, "_LOOKBACK", 3)
        patch.setattr(guidance, "_GRAMMARS", 2)
        guides = fresh()
        for call in calls:
            cursors = [placed(*place) for place in call]
            together = masks(guides, *cursors)
            alone = []
            for each in cursors:
                reference._compiled.clear()
                reference._matchers.clear()
                alone.append(masks(reference, each))
            np.testing.assert_array_equal(together, np.concatenate(alone))
            assert len(guides._matchers) <= guides._capacity
            assert len(guides._compiled) <= 2


@settings(max_examples=40)
@given(place=PLACES)
def test_M3_a_row_behind_drafts_is_the_row_of_the_cursor_that_accepted_them(guides, place):
    each = placed(*place[:-1], False)
    rows = masks(guides, each)
    for row, drafts in zip(rows, range(len(each.drafts) + 1), strict=True):
        accepted = np.concatenate([each.tokens, each.drafts[:drafts]])
        np.testing.assert_array_equal(row, masks(fresh(), cursor(each.grammar, accepted))[0])


def test_L1_a_turn_costs_one_copy_and_its_new_tokens(guides, monkeypatch):
    """Grown token by token, drafts by drafts or not at all, no cursor is parsed from its start again."""
    grammar = Grammar.regex("[a-c]*")
    tokens = spelled("abc" * 30)
    consumed = []
    real = Guides._consume
    monkeypatch.setattr(
        Guides, "_consume", lambda self, matcher, new: consumed.append(len(new)) or real(self, matcher, new)
    )
    for length in [1, 2, 2, 6, 7, 20, 60, 60]:
        masks(guides, cursor(grammar, tokens[:length]), cursor(grammar, tokens[:length]))
    assert consumed == [1, 1, 4, 1, 13, 40]


def test_L1_what_is_cached_is_bounded(guides):
    guides = fresh()
    tokens = spelled("ab" * 100)
    for length in range(200):
        masks(guides, cursor(Grammar.regex("[a-c]*"), tokens[:length]))
    assert len(guides._matchers) == guides._capacity == guidance._SPARE_MATCHERS + 2


def test_L3_masks_may_be_asked_for_from_any_thread(guides):
    turns = [(grammar, tokens) for grammar, turns in zip(GRAMMARS, TURNS, strict=True) for tokens in turns]
    calls = [cursor(grammar, tokens[:length]) for length in range(8) for grammar, tokens in turns] * 4
    alone = fresh()
    expected = [masks(alone, call) for call in calls]
    shared = fresh()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for mask, known in zip(pool.map(lambda call: masks(shared, call), calls), expected, strict=True):
            np.testing.assert_array_equal(mask, known)


# Forced spans.


@pytest.mark.parametrize(
    "text", ["the world", "世界 😀", '{"the": "world"}', "<s> <|im_end|>", "a <two words> b"]
)
def test_L5_forced_text_is_spelled_as_the_tokenizer_spells_it(guides, text):
    """L5: a constant is forced to its end, unless what follows could join its last token."""
    grammar = Grammar.lark(f"start: {json.dumps(text, ensure_ascii=False)}")
    forced = guides.forced(grammar, [])
    assert list(forced) == TOKENIZER.encode_within(text)
    assert guides.is_complete(grammar, forced)
    assert guides.forced(grammar, forced) == ()


@settings(max_examples=40)
@given(place=PLACES)
def test_L5_forced_tokens_are_the_only_ones_that_the_masks_allow(guides, place):
    each = placed(*place)
    forced = guides.forced(each.grammar, each.tokens)
    rows = masks(guides, each._replace(drafts=np.array(forced, np.int32)))
    for row, token in zip(rows, forced, strict=False):
        assert np.flatnonzero(row).tolist() == [token]
    assert rows[-1].any()
    assert guides.forced(each.grammar, [*each.tokens, *forced]) == ()


def test_C6_no_eos_is_forced_even_where_a_grammar_names_one(guides):
    assert guides.forced(Grammar.lark(f'start: "a" {toy.END} "b"'), []) == tuple(spelled("a"))


def test_L5_nothing_is_forced_where_there_is_a_choice(guides):
    assert guides.forced(Grammar.regex("a|b"), []) == ()
    assert guides.forced(Grammar.regex("ab?"), spelled("a")) == ()
    assert guides.forced(Grammar.regex("a"), spelled("a")) == ()


# Errors.


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.regex("a("), "unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.regex(""), "empty"),
        (lambda: Grammar.regex(r"[^\s\S]"), "no text satisfies it"),
        (lambda: Grammar.regex("\ud800"), "surrogates"),
        (lambda: Grammar.lark(""), "empty"),
        (lambda: Grammar.lark("start: foo"), 'unknown name: "foo"'),
        (lambda: Grammar.lark('begin: "a"'), "no start rule"),
        (lambda: Grammar.lark('start: "a'), "Lark grammar"),
        (lambda: Grammar.lark('{"grammars": [{"json_schema": {}}]}'), "expecting rule"),
        (lambda: Grammar.json_schema(""), "Expecting value"),
        (lambda: Grammar.json_schema("[1]"), "no object"),
        (lambda: Grammar.json_schema(False), "nothing satisfies false"),
        (lambda: Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (lambda: Grammar.json_schema({"type": "string", "enum": [1]}), "Unsatisfiable"),
        (lambda: Grammar.json_schema({"format": "foo", "type": "string"}), "foo"),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "not JSON compliant"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "not JSON serializable"),
        (lambda: Grammar.json_schema({"x-guidance": 5}), "invalid type"),
    ],
)
def test_L4_bad_grammars_are_refused_at_once_with_the_librarys_reason(make, reason):
    """L4, C17."""
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_L4_good_bad_good_needs_no_tokenizer_and_changes_nothing(guides):
    """C17: a malformed grammar between two good ones."""
    before = masks(guides, cursor(Grammar.regex("ab")))
    with pytest.raises(ValueError):
        Grammar.regex("(")
    np.testing.assert_array_equal(masks(guides, cursor(Grammar.regex("ab"))), before)


def test_L1_equal_grammars_are_one_key():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert Grammar.json_schema(schema) == Grammar.json_schema(json.dumps(schema))
    assert hash(Grammar.json_schema(schema)) == hash(Grammar.json_schema(dict(schema)))
    assert Grammar.json_schema(True) == Grammar.json_schema({})
    assert Grammar.regex("a") != Grammar.lark('start: "a"')


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
def test_L4_a_grammar_that_is_no_text_is_a_type_error(make):
    with pytest.raises(TypeError, match="give a text"):
        make(5)


def test_L1_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"jaxengine\[guidance\]"):
        Grammar.regex("a")
    with pytest.raises(ImportError, match=r"jaxengine\[guidance\]"):
        fresh()


@pytest.mark.parametrize("token", [spelled("x")[0], *EOS, TOKENIZER.vocab_size, WIDTH - 1, -1])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_C6_a_wrong_token_in_a_turn_is_a_permanent_error_of_that_cursor(token, length):
    """C6, C17, L3: named by its place; the others go on, before and after it, and so does the turn without it."""
    guides = fresh()
    grammar = Grammar.regex("[a-c]*d")
    good = cursor(grammar, spelled("ab"))
    bad = cursor(grammar, [*spelled("abc"[:length]), token, *spelled("a")])
    expected = masks(fresh(), good)
    for _ in range(2):
        with pytest.raises(GuidanceError) as caught:
            masks(guides, good, bad, good)
        assert caught.value.cursor == 1
        np.testing.assert_array_equal(masks(guides, good), expected)
    assert allowed(guides, grammar, spelled("abc"[:length])) == allowed(
        fresh(), grammar, spelled("abc"[:length])
    )


def test_C17_a_grammar_that_this_tokenizer_cannot_satisfy_is_a_permanent_error():
    tokenizer = tokenizer_of(toy.metaspace)
    guides = fresh((), tokenizer, 100)
    for grammar in [Grammar.regex("a世b"), Grammar.regex("[世界]"), Grammar.lark('start: "a" <|nowhere|>')]:
        with pytest.raises(GuidanceError):
            allowed(guides, grammar)
    assert allowed(guides, Grammar.regex("a|b")) == {tokenizer.encode_within(letter)[0] for letter in "ab"}


def with_limits(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    small = guidance._library().LLParserLimits(verbose_errors=False, **limits)
    monkeypatch.setattr(guidance, "_limits", lambda: small)


def test_C17_a_limit_of_the_library_is_a_permanent_error_of_that_cursor(monkeypatch):
    hard, easy = Grammar.regex("[a-z]*x[a-z]{30}"), Grammar.regex("ab*")
    with_limits(monkeypatch, max_lexer_states=10)
    guides = fresh()
    for _ in range(2):
        with pytest.raises(GuidanceError, match="too many states"):
            masks(guides, cursor(easy), cursor(hard, spelled("axx")))
    assert allowed(guides, easy) == set(spelled("a"))


def test_C17_what_other_turns_made_of_a_grammar_fails_none(monkeypatch):
    """The library counts the states that all turns of a grammar have met; here three turns together are too many."""
    grammar = Grammar.regex("a[b-y]{1,12}z|b[c-y]{1,12}a|c[d-y]{1,12}b")
    with_limits(monkeypatch, max_lexer_states=40)
    guides = fresh()
    dropped = []
    real = guides._forget
    monkeypatch.setattr(guides, "_forget", lambda grammar: dropped.append(grammar) or real(grammar))
    for text in ["abbbbbbbbb", "bccccccccc", "cddddddddd"]:
        assert allowed(guides, grammar, spelled(text)) == allowed(fresh(), grammar, spelled(text))
    assert dropped


def test_C17_a_huge_grammar_is_refused_soon_and_shortly():
    """Left to itself the library panics here, after minutes."""
    names = {f"property_{number}": {"type": "integer"} for number in range(20_000)}
    with pytest.raises(ValueError, match=r"too (big|large)") as caught:
        Grammar.json_schema({"type": "object", "properties": names})
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match="too big") as caught:
        Grammar.lark("start: " + "|".join(f'"{name}"' for name in list(names) * 3))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, OSError])
def test_L3_a_transient_failure_passes_through_and_leaves_nothing_damaged(monkeypatch, failure):
    """L3: raised inside the library's call back into the tokenizer; the next try gives the right mask."""
    guides = fresh()
    grammar = Grammar.regex("Hello world")
    canonical = TOKENIZER.encode_within("Hello world")
    assert guides._table.greedy_tokenize("Hello world") != canonical, "what the library would go on with"
    error = failure("once")

    def fail(text: str) -> list[int]:
        raise error

    for call, right in [(allowed, {canonical[0]}), (Guides.forced, tuple(canonical))]:
        with monkeypatch.context() as patch:
            patch.setattr(guides._vocabulary, "_encode", fail)
            with pytest.raises(failure) as caught:
                call(guides, grammar, [])
            assert caught.value is error
            assert not guides._compiled
        assert call(guides, grammar, []) == right
        guides._forget(grammar)


def test_C6_a_damaged_matcher_fails_none():
    grammar = Grammar.regex("ab")
    guides = fresh()
    expected = allowed(guides, grammar, spelled("a"))
    (matcher,) = guides._matchers.values()
    assert not matcher.consume_token(spelled("x")[0])
    assert allowed(guides, grammar, spelled("a")) == expected


def test_L3_masks_of_another_size_are_refused(guides):
    one = cursor(Grammar.regex("a"))
    words = -(-WIDTH // 32)
    for out in [
        np.zeros((2, words), np.uint32),
        np.zeros((1, words + 1), np.uint32),
        np.zeros((1, words), np.int32),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"uint32[1, {words}]")):
            guides.fill([one], out)


def test_L3_masks_may_be_written_into_a_view(guides):
    """Rows of a larger array, for one transfer of contiguous rows."""
    pool = np.zeros((5, 2 * -(-WIDTH // 32)), np.uint32)
    grammar = Grammar.regex("ab")
    guides.fill([cursor(grammar)], pool[3:4, ::2])
    (expected,) = np.flatnonzero(masks(guides, cursor(grammar))[0])
    assert pool[3, 2 * (expected // 32)] == 1 << (expected % 32)
    assert not pool[:3].any()


def test_L1_a_tokenizer_or_eos_beyond_the_logits_is_refused():
    with pytest.raises(TextError, match="logits"):
        fresh((), TOKENIZER, TOKENIZER.vocab_size - 1)
    for token in [WIDTH, -1]:
        with pytest.raises(ValueError, match=f"EOS id {token} "):
            fresh([token])
