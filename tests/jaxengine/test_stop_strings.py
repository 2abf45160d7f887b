"""Stop strings in the engine: tokens, usage, texts and what is committed end at the token that completes the match
(K5, A7, A8, K6, cases C2, C4 and C18)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.failures import after_failure
from jaxengine.toy import LETTERS, continuation, next_token, toy_model, toy_tokenizer
from tests.jaxengine.chosen import PROMPTS, WIDE, Row, alone, begin, outcome, together
from tests.jaxengine.harness import SMALL, finish, tokens_of

Reason = je.FinishReason
MODEL = toy_model(text=True)
DECODE = toy_tokenizer().decode
LIMIT = 12
DISTINCT = next([token] for token in range(LETTERS) if len({token, *continuation([token], 6)}) == 7)
"""A prompt whose continuation names no token twice."""


def stopping(*stop, **fields):
    return je.SamplingParams(temperature=0.0, stop=stop, **fields)


def texts(events):
    return "".join(event.text for event in events)


def expected(tokens, stop):
    """Generated tokens, their text and the stop string, of what would be generated without stops."""
    for count in range(1, len(tokens) + 1):
        text = DECODE(tokens[:count])
        if found := [(text.index(each), -len(each), each) for each in stop if each in text]:
            begin_, _, which = min(found)
            return tokens[:count], text[:begin_], which
    return tokens, DECODE(tokens), ""


@st.composite
def matching(draw):
    """A prompt and stop strings of which some occur in its greedy continuation."""
    prompt = draw(PROMPTS)
    text = DECODE(continuation(prompt, LIMIT))
    spans = st.tuples(st.integers(0, LIMIT - 1), st.integers(1, 4)).map(lambda s: text[s[0] : s[0] + s[1]])
    return prompt, draw(st.lists(st.one_of(spans, st.text("abt", min_size=1, max_size=3)), max_size=3))


@given(case=matching(), drop=st.sets(st.integers(0, 12), max_size=3), drafts=st.booleans())
@settings(max_examples=40)
def test_K5_case_C2_C4_everything_ends_at_the_token_that_completes_a_match(case, drop, drafts):
    """With steps that fail or run in vain, and with drafts of which all, some or none are right."""
    prompt, stop = case
    tokens = continuation(prompt, LIMIT)
    generated, text, which = expected(tokens, stop)
    row = Row(prompt, stopping(*stop), LIMIT)
    proposals = {n: [*tokens[4 * n - 3 : 4 * n], 0] for n in (1, 2)} if drafts else None
    faults = {number: je.Stage.EVENTS for number in drop if number % 2}
    (found,) = together(MODEL, [row], WIDE, dropped=drop, faults=faults, drafts=proposals)
    sequence, processed, events = found
    assert sequence == [*prompt, *generated]
    assert processed == len(sequence) - 1
    assert [event.token for event in events] == generated
    assert texts(events) == text
    assert events[-1].stop == which
    assert not any(event.stop for event in events[:-1])
    assert events[-1].finish_reason == (Reason.STOP_STRING if which else Reason.MAX_GENERATED_TOKENS)
    assert events[-1].usage == je.Usage(len(prompt), len(generated))
    if not drafts:
        assert found == alone(MODEL, row)


def test_case_C2_a_stop_that_comes_piece_by_piece_is_never_shown():
    tokens = continuation(DISTINCT, 6)
    text = DECODE(tokens)
    _, _, events = alone(MODEL, Row(DISTINCT, stopping(text[2:5]), LIMIT))
    assert [event.text for event in events] == [text[0], text[1], "", "", ""]
    _, _, events = alone(MODEL, Row(DISTINCT, stopping(text[2:5] + "!"), 5))
    assert [event.text for event in events] == [text[0], text[1], "", "", text[2:5]]
    _, _, events = alone(
        toy_model(text=True, eos=[tokens[4]]), Row(DISTINCT, stopping(text[2:4] + "!"), LIMIT)
    )
    assert [event.text for event in events] == [text[0], text[1], "", "", text[2:4]]
    assert (events[-1].token, events[-1].finish_reason) == (-1, Reason.EOS)


@pytest.mark.parametrize("which", ["EOS", "STOP_STRING"])
def test_A7_of_ends_that_coincide_the_first_in_order_is_told(which):
    """The last token that the session has room for, and that the turn may generate, completes a stop."""
    tokens = continuation(DISTINCT, 4)
    eos = [tokens[3]] if which == "EOS" else []
    model = toy_model(text=True, eos=eos, max_length=5)
    _, _, events = alone(model, Row(DISTINCT, stopping(DECODE(tokens[3:])), 4))
    assert events[-1].finish_reason == Reason[which]
    assert texts(events) == DECODE(tokens[:3])
    assert events[-1].stop == ("" if eos else DECODE(tokens[3:]))


def test_K5_A9_a_turn_after_a_stop_begins_a_new_text():
    tokens = continuation([3, 1], 3)
    stop = DECODE(tokens[1:])
    state, request_id = begin(je.init_state(MODEL, SMALL), Row([3, 1], stopping(stop), 8))
    state, events = finish(MODEL, state)
    assert (texts(events), events[-1].stop) == (DECODE(tokens[:1]), stop)
    sequence = [3, 1, *tokens]
    assert tokens_of(state, request_id) == sequence
    # Each turn begins with the first letter of a stop that the second would complete, were it one text.
    first = next_token([*sequence, 5])
    over_the_border = stopping(stop[-1] + DECODE([first]))
    state, turn = je.begin_turn(state, request_id, [5], je.TurnOptions(1, sampling=over_the_border))
    state, events = finish(MODEL, state)
    assert (turn, texts(events), events[-1].stop) == (2, DECODE([first]), "")
    assert tokens_of(state, request_id) == [*sequence, 5, first]


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_A8_case_C2_a_turn_that_is_cut_shows_what_was_held_back(how):
    """All of a turn's texts joined are its text, so the terminal event has what could have become a stop."""
    tokens = continuation([3, 1], 3)
    text = DECODE(tokens)
    held = stopping(text + "...")
    state, request_id = begin(je.init_state(MODEL, SMALL), Row([3, 1], held, 8))
    for _ in range(3):
        state, _ = je.step(MODEL, state)
    assert texts(state.control.events) == ""
    if how == "cancel":
        state, _ = je.cancel_turn(state, request_id, 1)
    else:
        state = after_failure(state, [request_id], je.ExecutionError("who knows"))
    *_, last = [event for event in state.control.events if event.request_id]
    assert last.finish_reason == (Reason.CANCELLED if how == "cancel" else Reason.FAILED)
    assert texts(state.control.events) == text
    assert outcome(state, request_id, [])[0] == [3, 1, *tokens]


def test_A8_a_cancelled_turns_text_is_not_shown_again():
    held = stopping(DECODE(continuation([3, 1], 3)) + "...")
    state, request_id = begin(je.init_state(MODEL, SMALL), Row([3, 1], held, 8))
    for _ in range(2):
        state, _ = je.step(MODEL, state)
    state, _ = je.cancel_turn(state, request_id, 1)
    state, _ = je.drain(state, 10)
    state, turn = je.begin_turn(state, request_id, [4])
    state, _ = je.cancel_turn(state, request_id, turn)
    (event,) = state.control.events
    assert (event.text, event.token) == ("", -1)


@given(prompt=PROMPTS, seed=st.integers(0, 9))
@settings(max_examples=15)
def test_K5_case_C18_without_a_stop_the_texts_joined_are_the_tokens_decoded(prompt, seed):
    sampling = je.SamplingParams(temperature=8.0, seed=seed, stop=["zz", ".z"])
    sequence, _, events = alone(MODEL, Row(prompt, sampling, LIMIT))
    if not events[-1].stop:
        assert texts(events) == DECODE(sequence[len(prompt) :])
