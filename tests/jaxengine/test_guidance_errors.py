"""Bad grammars are refused at once; a turn that can't go on fails alone, and what failed for a moment is repeated."""

import json
import re
import sys

import numpy as np
import pytest

from jaxengine import guidance
from jaxengine.guidance import Grammar, GuidanceError, Guides
from jaxengine.text import TextError
from tests.jaxengine.guided import EOS, TOKENIZER, WIDTH, allowed, cursor, fresh, masks, spelled, tokenizer_of
from tests.text import toy_tokenizers as toy


@pytest.fixture(scope="module")
def guides() -> Guides:
    return fresh()


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
        (lambda: Grammar("json_schema", "{"), "Expecting property name"),
        (lambda: Grammar("json_schema", "5"), "must be an object"),
        (lambda: Grammar("json_schema", ""), "the JSON schema is empty"),
        (lambda: Grammar("regex", ""), "the regular expression is empty"),
        (lambda: Grammar("regex", "a("), "unclosed group"),
        (lambda: Grammar("lark", "start: foo"), 'unknown name: "foo"'),
        (lambda: Grammar("ebnf", "a"), "kind is 'ebnf'; use one of json_schema, regex, lark"),
        (lambda: Grammar([], "a"), "kind is []; use one of"),
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


@pytest.mark.parametrize(
    "attributes", ["temperature=0.5", "capture", 'capture="x"', 'stop="b", stop_capture="x"']
)
@pytest.mark.parametrize("rule", ["w[{}]", "w [ {} ] ", "!w[max_tokens=3,{}]", "?w[lazy, {}]"])
def test_L4_an_attribute_that_would_be_ignored_is_refused_by_name(attributes, rule):
    name = re.search(r"stop_\w+|temperature|capture", attributes)[0]
    with pytest.raises(ValueError, match=f"the attribute {name} of its rules has no effect"):
        Grammar.lark(f'start: w\n{rule.format(attributes)}: /[a-z]/\nv: "\\""')


@pytest.mark.parametrize(
    "text",
    [
        'start: "[temperature=1]:"',
        "start: /x[capture]:/",
        'start: /"/ /[capture]:/ "\\""',
        'start: "a" // w[temperature=1]: ...',
        '# w[temperature=1]:\nstart: "a"',
        "start: capture\ncapture[max_tokens=3]: /a+/",
        "start: w\nw[lazy]: /[a-z]+b/",
    ],
)
def test_L4_what_only_looks_like_such_an_attribute_is_taken(text):
    assert Grammar.lark(text).text == text


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark, lambda text: Grammar("json_schema", text)])
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
def test_case_C6_a_wrong_token_in_a_turn_is_a_permanent_error_of_that_cursor(token, length):
    """C6, C17, L3: the others go on, before and after it, and so does the turn without the token."""
    guides = fresh()
    grammar = Grammar.regex("[a-c]*d")
    good = cursor(grammar, spelled("ab"))
    bad = cursor(grammar, [*spelled("abc"[:length]), token, *spelled("a")])
    expected = masks(fresh(), good)
    np.testing.assert_array_equal(masks(guides, good), expected)
    for _ in range(2):
        with pytest.raises(GuidanceError, match="token"):
            masks(guides, bad)
        np.testing.assert_array_equal(masks(guides, good), expected)
    assert allowed(guides, grammar, spelled("abc"[:length])) == allowed(
        fresh(), grammar, spelled("abc"[:length])
    )


def test_case_C17_a_grammar_that_this_tokenizer_cannot_satisfy_is_a_permanent_error():
    tokenizer = tokenizer_of(toy.metaspace)
    guides = fresh((), tokenizer, 100)
    for grammar in [Grammar.regex("a世b"), Grammar.regex("[世界]"), Grammar.lark('start: "a" <|nowhere|>')]:
        with pytest.raises(GuidanceError):
            allowed(guides, grammar)
    assert allowed(guides, Grammar.regex("a|b")) == {tokenizer.encode_within(letter)[0] for letter in "ab"}


def with_limits(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    small = guidance.library().LLParserLimits(verbose_errors=False, **limits)
    monkeypatch.setattr(guidance, "limits", lambda: small)


def test_case_C17_a_limit_of_the_library_is_a_permanent_error_of_that_cursor(monkeypatch):
    hard, easy = Grammar.regex("[a-z]*x[a-z]{30}"), Grammar.regex("ab*")
    with_limits(monkeypatch, max_lexer_states=10)
    guides = fresh()
    for _ in range(2):
        with pytest.raises(GuidanceError, match="too many states"):
            masks(guides, cursor(easy), cursor(hard, spelled("axx")))
    assert allowed(guides, easy) == set(spelled("a"))


def test_case_C17_what_other_turns_made_of_a_grammar_fails_none(monkeypatch):
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


def test_case_C17_a_huge_grammar_is_refused_soon_and_shortly():
    """Left to itself the library panics here, after minutes."""
    names = {f"property_{number}": {"type": "integer"} for number in range(20_000)}
    with pytest.raises(ValueError, match=r"too (big|large)") as caught:
        Grammar.json_schema({"type": "object", "properties": names})
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match="too big") as caught:
        Grammar.lark("start: " + "|".join(f'"{name}"' for name in list(names) * 3))
    assert len(str(caught.value)) < 600


ENDLESS_COMMA = {"item_separator": "1+", "whitespace_flexible": False}
LOOP = 'w: /a+/\nt: "a"'  # what the terminal `w` may take it takes, so that no `t` is ever left


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.lark(f"start: w t\n{LOOP}"),
        lambda: Grammar.lark(f'%llguidance {{"no_forcing": false}}\nstart: "b" w t\n{LOOP} // end'),
        lambda: Grammar.lark('start: "a" start'),
        lambda: Grammar.json_schema(
            {"type": "array", "items": {"const": 1}, "minItems": 2, "x-guidance": ENDLESS_COMMA}
        ),
    ],
    ids=["terminal", "behind text", "rule", "spacing"],
)
def test_L4_case_C17_a_grammar_that_forces_text_without_end_is_refused(make):
    """Left to itself the library follows the text of all but the rule for ever, and takes all memory."""
    with pytest.raises(ValueError, match="forces more than 20000 bytes of text at one place"):
        make()


def test_L3_case_C17_text_without_end_later_on_ends_those_that_come_to_it_only(guides):
    grammar = Grammar.lark(f'start: "b" | "c" "cccc"? w t\n{LOOP}')
    assert allowed(guides, grammar) == set(spelled("b")) | set(spelled("c"))
    for _ in range(2):
        with pytest.raises(GuidanceError, match="forces more than 20000 bytes"):
            allowed(guides, grammar, spelled("ca"))
        assert allowed(guides, grammar, spelled("b")) == set(EOS)
    with pytest.raises(GuidanceError, match="satisfy the grammar"):
        allowed(guides, grammar, spelled("d"))


def test_L5_case_C17_long_text_that_ends_is_still_forced(guides):
    grammar = Grammar.lark('start: ("x" | "y") "' + "z" * 1000 + '" /a+/ "b"')
    forced = guides.forced(grammar, spelled("x"))
    assert len(forced) > 900
    (_, *masks_behind) = masks(guides, cursor(grammar, spelled("x"), forced[:5]))
    for place, mask in enumerate(masks_behind, 1):
        assert set(np.flatnonzero(mask)) == {forced[place]}


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


def test_case_C6_a_damaged_matcher_fails_none():
    grammar = Grammar.regex("ab")
    guides = fresh()
    expected = allowed(guides, grammar, spelled("a"))
    (matcher,) = guides._matchers.values()
    assert not matcher.consume_token(spelled("x")[0])
    assert allowed(guides, grammar, spelled("a")) == expected


def test_L3_masks_of_another_size_are_refused(guides):
    words = -(-WIDTH // 32)
    for out in [
        np.zeros((2, words), np.uint32),
        np.zeros((1, words + 1), np.uint32),
        np.zeros((1, words), np.int32),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"uint32[1, {words}]")):
            guides.fill(Grammar.regex("a"), (), (), out)


def test_L3_masks_may_be_written_into_a_view(guides):
    """Rows of a larger array, for one transfer of contiguous rows."""
    pool = np.zeros((5, 2 * -(-WIDTH // 32)), np.uint32)
    grammar = Grammar.regex("ab")
    guides.fill(grammar, (), (), pool[3:4, ::2])
    (expected,) = np.flatnonzero(masks(guides, cursor(grammar))[0])
    assert pool[3, 2 * (expected // 32)] == 1 << (expected % 32)
    assert not pool[:3].any()


def test_L1_a_tokenizer_or_eos_beyond_the_logits_is_refused():
    with pytest.raises(TextError, match="logits"):
        fresh((), TOKENIZER, TOKENIZER.vocab_size - 1)
    for token in [WIDTH, -1]:
        with pytest.raises(ValueError, match=f"EOS id {token} "):
            fresh([token])
