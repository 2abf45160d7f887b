"""A turn that a limit or a stop string ends before its grammar does says so, and no other turn does (L1, case C28).

The oracle is the turn's text: whether it is a word of a finite language, or JSON that satisfies its schema.
"""

import dataclasses
import json
import re

import hypothesis.strategies as st
import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings

import jaxengine as je
from jaxengine.guidance import GuidanceError
from jaxengine.state import FAILED_STEPS
from jaxengine.text import Tokenizer
from jaxengine.toy import LETTERS, VOCAB, toy_model
from tests.jaxengine.breaking import KINDS, SURVIVED
from tests.jaxengine.guided import TOKENIZER, fresh
from tests.jaxengine.guided_turns import (
    CONFIG,
    EOS,
    GREEDY,
    MODEL,
    WORDS,
    Job,
    broken,
    serve,
    unforced,
)
from tests.jaxengine.guided_turns import (
    LETTERS as SPELLED,
)
from tests.jaxengine.harness import assert_same, leaves

INCOMPLETE = je.EngineEventFlags.GRAMMAR_INCOMPLETE
CUT = {
    je.FinishReason.STOP_STRING,
    je.FinishReason.MAX_GENERATED_TOKENS,
    je.FinishReason.MAX_SESSION_TOKENS,
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def json_tokenizer() -> Tokenizer:
    """Ids of what JSON of few words needs, one character each, in place of the toy model's letters."""
    letters = (
        '\u010a{}":,0123456789abcdefgh\u0120]['  # U+010A is how byte-level vocabularies spell a line feed
    )
    assert len(letters) == LETTERS - 1
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters + "z")}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([f"<{token}>" for token in range(LETTERS, VOCAB)])
    return Tokenizer(backend)


JSON_MODEL = dataclasses.replace(toy_model(eos=(EOS,)), read_tokenizer=json_tokenizer)
NEWLINE = JSON_MODEL.tokenizer.encode("\n")[0]
PREFERS_NEWLINE = je.SamplingParams(temperature=0.0, logit_bias={NEWLINE: 100.0})
FREE = je.Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_flexible": True}})
BOUNDED = je.Grammar.json_schema(SCHEMA)


def is_whole(text):
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.slow
@settings(max_examples=25)
@given(
    prompt=st.lists(st.integers(0, 26), min_size=1, max_size=6).map(tuple),
    kind=st.sampled_from(sorted(WORDS)),
    limit=st.integers(1, 24),
    stop=st.lists(st.text(st.sampled_from(SPELLED), min_size=1, max_size=2), max_size=2),
)
def test_case_C28_the_flag_tells_of_every_text_that_its_grammar_does_not_allow_to_end(
    prompt, kind, limit, stop
):
    """Whatever ends it, and the same where no forced span is run as drafts."""
    grammar, words = WORDS[kind]
    job = Job(prompt, grammar, limit, dataclasses.replace(GREEDY, stop=stop))
    ((result,), _) = serve([job])
    assert result.incomplete == (result.text not in words)
    assert result.reason in CUT | {je.FinishReason.EOS}
    with unforced():
        assert serve([job])[0] == [result]


def test_case_C28_a_model_that_prefers_newlines():
    """20 tokens: where the schema leaves blanks free they are all spent on them; where it doesn't, on the JSON."""
    job = Job((3, 1), FREE, 20, PREFERS_NEWLINE)
    ((free,), _) = serve([job], model=JSON_MODEL)
    assert (free.text, free.reason) == ("{" + "\n" * 19, je.FinishReason.MAX_GENERATED_TOKENS)
    assert free.incomplete
    ends = set()
    for limit in (6, 7, 20):
        for prompt in range(6):
            bounded_job = dataclasses.replace(job, prompt=(prompt,), grammar=BOUNDED, limit=limit)
            ((bounded,), _) = serve([bounded_job], model=JSON_MODEL)
            assert "\n" not in bounded.text
            assert bounded.incomplete == (not is_whole(bounded.text))
            ends.add((bounded.reason, bounded.incomplete))
    assert {(je.FinishReason.EOS, False), (je.FinishReason.MAX_GENERATED_TOKENS, True)} <= ends


@pytest.mark.parametrize(("stage", "kind"), SURVIVED)
def test_case_C28_L2_F8_a_fault_at_any_stage_changes_no_flag(stage, kind):
    """In the step that ends the turns, among others; a whole text, two that are cut, and one without a grammar."""
    batch = [
        Job((3, 1), FREE, 3, PREFERS_NEWLINE),
        Job((4,), BOUNDED, 3),
        Job((7, 7), None, 3),
        Job((5,), je.Grammar.regex("abc"), 3),
    ]
    expected, _ = serve(batch, model=JSON_MODEL)
    assert [result.incomplete for result in expected] == [True, True, False, False]
    config = dataclasses.replace(CONFIG, failure_policy="isolate")
    with je.inject_fault(stage, KINDS[kind](), skip=1) as fault:
        results, _ = serve(batch, config, JSON_MODEL)
    assert fault.fired
    assert results == expected


def test_case_C28_L2_a_dropped_step_says_nothing_and_changes_nothing():
    state, request_id = je.create_request(
        je.init_state(MODEL, CONFIG), je.RequestOptions(grammar=WORDS["regex"][0])
    )
    state, _ = je.begin_turn(state, request_id, [3], je.TurnOptions(2))
    state, _ = je.step(MODEL, state)
    before = leaves(state)
    for _ in range(2):
        je.execute(MODEL, state, je.plan_step(state))
        assert_same(leaves(state), before)
        assert not any(INCOMPLETE in event.flags for event in state.control.events)
    _, events = je.step(MODEL, state)
    assert events[-1].flags == INCOMPLETE | je.EngineEventFlags.TOKEN | je.EngineEventFlags.TURN_FINISHED


def test_case_C28_a_session_that_is_full_says_so():
    model = toy_model(text=True, eos=(EOS,), max_length=4)
    ((result,), _) = serve([Job((3, 1), WORDS["lark"][0])], model=model)
    assert (result.reason, result.incomplete) == (je.FinishReason.MAX_SESSION_TOKENS, True)


def test_case_C28_only_turns_that_something_else_ends_are_looked_at():
    batch = [Job((3, 1), WORDS["regex"][0]), Job((4,), None, 3), Job((5,), WORDS["json"][0], 2)]
    with broken(MODEL, "is_complete") as calls:
        results, _ = serve(batch)
    assert len(calls) == 1
    assert [result.incomplete for result in results] == [False, False, True]


def test_L3_case_C28_what_cannot_be_told_for_a_moment_costs_a_retry():
    batch = [Job((3, 1), WORDS["regex"][0], 3), Job((4,), WORDS["json"][0], 2)]
    expected, _ = serve(batch)
    with broken(MODEL, "is_complete", OSError("busy"), None, OSError("busy")) as calls:
        results, engine = serve(batch)
    assert results == expected
    assert len(calls) > 3
    assert engine.state.control.counters[FAILED_STEPS] == 2


def test_case_C28_a_text_that_nothing_shows_to_be_complete_is_flagged():
    job = Job((3, 1), je.Grammar.regex("[a-z]+"), 3)
    assert not serve([job])[0][0].incomplete
    with broken(MODEL, "is_complete", GuidanceError("given up")):
        ((result,), _) = serve([job])
    assert (result.reason, result.incomplete) == (je.FinishReason.MAX_GENERATED_TOKENS, True)


def test_case_C28_cancelled_turns_are_not_judged():
    engine = je.Engine(MODEL, CONFIG)
    request = engine.create_request(je.RequestOptions(grammar=WORDS["lark"][0]))
    request.begin_turn([3])
    engine.run()
    request.cancel_turn(1)
    (end,) = engine.run()
    assert end.flags == je.EngineEventFlags.TURN_FINISHED


@pytest.mark.parametrize("text", ["the world", "Hello, Hello world", "世界 😀 the 世界", "é, é\n\n the"])
def test_case_C28_K5_before_a_stop_string_is_what_the_text_says_before_it(text):
    """Whatever tokens the match begins and ends in, cut tokens and characters of several tokens included."""
    guides = fresh()
    tokens = TOKENIZER.encode_within(text)
    cuts = 0
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            stop = text[begin:end]
            kept = next(
                n for n in range(1, len(tokens) + 1) if stop in TOKENIZER.decode(tokens[:n]).rstrip("\ufffd")
            )
            shown = text[: text.index(stop)]
            cuts += TOKENIZER.encode_within(shown) != tokens[: len(TOKENIZER.encode_within(shown))]
            whole = je.Grammar.regex(f"({re.escape(text)}|{re.escape(shown)})")
            assert guides.is_complete(whole, tokens[:kept], stop)
            longer = je.Grammar.regex(re.escape(text))
            assert not guides.is_complete(longer, tokens[:kept], stop)
    assert cuts


def test_L1_no_turn_of_a_large_batch_is_parsed_anew(monkeypatch):
    """More turns than matchers are kept for otherwise; each step gives each turn's matcher its newest token only."""
    monkeypatch.setattr("jaxengine.guidance._SPARE_MATCHERS", 0)
    model = toy_model(text=True, eos=(EOS,))
    consumed = []
    real = type(model.guides)._consume
    monkeypatch.setattr(
        type(model.guides),
        "_consume",
        lambda self, matcher, new: consumed.append(len(new)) or real(self, matcher, new),
    )
    results, _ = serve([Job((n,), je.Grammar.regex("[a-y ]*z"), 6) for n in range(8)], model=model)
    assert {result.reason for result in results} == {je.FinishReason.MAX_GENERATED_TOKENS}
    assert set(consumed) == {1}
