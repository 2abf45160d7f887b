"""Cursors are values: no order of calls changes a mask, and drafts and forced spans follow from the masks.

The oracle is a fresh `Guides`, which has no cache to be wrong in.
"""

import concurrent.futures
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine import guidance
from jaxengine.guidance import Grammar, Guides
from tests.jaxengine.guided import (
    ARITHMETIC,
    EOS,
    TOKENIZER,
    Cursor,
    allowed,
    cursor,
    fresh,
    masks,
    spelled,
)
from tests.text import toy_tokenizers as toy


@pytest.fixture(scope="module")
def guides() -> Guides:
    return fresh()


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


def test_M3_case_C6_a_draft_into_a_dead_end_changes_no_mask_before_it(guides):
    """An EOS that a grammar names inside is never allowed, so nothing follows the `a` of `za`."""
    grammar = Grammar.lark(f'start: "z" ("a" {toy.END} "b" | "c")')
    z, a, b, c = spelled("zabc")
    for drafts in [[z, a], [z, a, b]]:
        rows = masks(guides, cursor(grammar, [], drafts))
        assert [set(np.flatnonzero(row)) for row in rows] == [{z}, {a, c}, *[set()] * (len(drafts) - 1)]
    assert allowed(guides, grammar, [z]) == {a, c}
    only = Grammar.lark(f'start: "z" ("a" {toy.END} "b") | "y"')
    first = masks(guides, cursor(only, [], [z, a]))[0]
    assert set(np.flatnonzero(first)) == allowed(guides, only, []) == set(spelled("yz"))


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
    guides.make_room(10)
    guides.make_room(5)
    for length in range(200):
        masks(guides, cursor(Grammar.regex("[a-c]*"), tokens[:length]))
    assert len(guides._matchers) == guides._capacity == guidance._SPARE_MATCHERS + 2 * 10


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


def test_case_C6_no_eos_is_forced_even_where_a_grammar_names_one(guides):
    assert guides.forced(Grammar.lark(f'start: "a" {toy.END} "b"'), []) == tuple(spelled("a"))


def test_L5_nothing_is_forced_where_there_is_a_choice(guides):
    assert guides.forced(Grammar.regex("a|b"), []) == ()
    assert guides.forced(Grammar.regex("ab?"), spelled("a")) == ()
    assert guides.forced(Grammar.regex("a"), spelled("a")) == ()
