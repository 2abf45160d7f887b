"""Grammars that fail, for a moment or for good, cost whom they should, and bad ones never begin (L3, L4, case C17)."""

import dataclasses

import pytest

import jaxengine as je
from jaxengine.guidance import GuidanceError
from jaxengine.toy import toy_model
from tests.jaxengine.guided_turns import CONFIG, EOS, GREEDY, MODEL, WORDS, Job, broken, ids, serve, unforced
from tests.jaxengine.harness import assert_same, leaves

GUIDANCE, RETRYABLE = je.EngineErrorCode.GUIDANCE_FAILURE, je.EngineErrorCode.RETRYABLE_EXECUTION
FORCED, JSON = WORDS["forced"][0], WORDS["json"][0]
BATCH = [Job((3, 1), FORCED), Job((4,), JSON), Job((7, 7), None, 6)]


def begun(jobs=BATCH):
    engine = je.Engine(MODEL, CONFIG)
    requests = [
        engine.create_request(je.RequestOptions(sampling=job.sampling, grammar=job.grammar)) for job in jobs
    ]
    for job, request in zip(jobs, requests, strict=True):
        request.begin_turn(job.prompt, je.TurnOptions(job.limit))
    return engine, requests


def rest(engine):
    events = []
    while engine.has_pending_requests():
        events += engine.run()
    return events


def text_of(events, request):
    return "".join(event.text for event in events if event.request is request)


@pytest.mark.parametrize("method", ["fill", "forced"])
@pytest.mark.parametrize("after", [0, 1])
def test_L3_a_mask_that_fails_for_a_moment_costs_a_retry(method, after):
    """In the first step or the second; the committed state is as it was and the texts are the same."""
    expected, _ = serve(BATCH)
    engine, requests = begun()
    events = [event for _ in range(after) for event in engine.run()]
    before = leaves(engine.state)
    with broken(MODEL, method, RuntimeError("the table is busy")):
        (event,) = engine.run()
    assert (event.request, event.flags, event.error_code) == (None, je.EngineEventFlags.RETRYABLE, RETRYABLE)
    assert event.detail == "the mask of request 1 could not be made: the table is busy"
    counted = engine.state.control.requests.failures.tolist()
    assert counted == [1, 0, 0]
    # Nothing but the counts of failures has changed.
    control = engine.state.control
    restored = dataclasses.replace(
        control,
        counters=before_counters(control),
        requests=control.requests.replace(failures=control.requests.failures * 0),
    )
    assert_same(leaves(engine.state.replace(control=restored)), before)
    events += rest(engine)
    assert [text_of(events, request) for request in requests] == [result.text for result in expected]


def before_counters(control):
    counters = control.counters.copy()
    counters[je.state.FAILED_STEPS] -= 1
    return counters


def test_L3_case_C17_a_mask_that_fails_too_often_ends_that_request_only():
    expected, _ = serve(BATCH)
    engine, requests = begun()
    limit = CONFIG.max_row_retries
    with broken(MODEL, "fill", *[RuntimeError("the table is gone")] * (limit + 1)):
        events = [event for _ in range(limit + 1) for event in engine.run()]
        assert [event.request for event in events] == [*[None] * limit, None, requests[0]]
        events += rest(engine)
    assert (events[limit + 1].error_code, events[limit + 1].finish_reason) == (
        RETRYABLE,
        je.FinishReason.FAILED,
    )
    assert [text_of(events, request) for request in requests[1:]] == [r.text for r in expected[1:]]


@pytest.mark.parametrize("error", [OSError("busy"), RuntimeError("busy"), MemoryError("no room")])
def test_L3_what_fails_for_a_moment_when_a_grammar_is_compiled_ahead_is_left_to_the_step(error):
    """For a request and for a turn's own grammar; the text is that of a day without trouble."""
    expected, _ = serve([Job((3, 1), FORCED)])
    engine = je.Engine(MODEL, CONFIG)
    with broken(MODEL, "fill", error, error) as calls:
        request = engine.create_request(je.RequestOptions(grammar=FORCED))
        other = engine.create_request()
        other.begin_turn([4], je.TurnOptions(grammar=JSON))
    assert len(calls) == 2
    request.begin_turn([3, 1])
    events = rest(engine)
    assert text_of(events, request) == expected[0].text
    assert text_of(events, other) in WORDS["json"][1]


def test_L3_memory_that_runs_out_in_a_mask_is_told_as_such():
    engine, _ = begun()
    with broken(MODEL, "fill", MemoryError("no room")):
        (event,) = engine.run()
    assert event.error_code == je.EngineErrorCode.EXECUTION_CAPACITY_EXCEEDED
    assert engine.state.control.failure is None


@pytest.mark.parametrize("after", [0, 1])
def test_L3_a_grammar_that_is_given_up_ends_its_request_only(after):
    """By one event with a sentence; the others go on with the same tokens, and the next turn begins as ever."""
    expected, _ = serve(BATCH)
    engine, requests = begun()
    events = [event for _ in range(after) for event in engine.run()]
    with broken(MODEL, "fill", GuidanceError("the grammar grew too large")):
        (event,) = engine.run()
    assert event.request is requests[0]
    assert event.flags == je.EngineEventFlags.TURN_FINISHED | je.EngineEventFlags.FAILED
    assert (event.finish_reason, event.error_code) == (je.FinishReason.FAILED, GUIDANCE)
    assert event.detail == "the grammar of request 1 can't go on: the grammar grew too large"
    assert event.usage.generated_tokens == after
    events += rest(engine)
    assert [text_of(events, request) for request in requests[1:]] == [r.text for r in expected[1:]]
    assert sum(event.request is requests[0] for event in events) == after
    requests[0].begin_turn([5])
    assert text_of(rest(engine), requests[0]) in WORDS["forced"][1]


def test_L3_a_forced_span_that_the_library_gives_up_is_left_to_the_mask():
    expected, _ = serve(BATCH)
    with broken(MODEL, "forced", *[GuidanceError("given up")] * 9):
        results, _ = serve(BATCH)
    assert results == expected


BAD = [
    lambda: je.Grammar.regex("("),
    lambda: je.Grammar.lark('start: missing "a"'),
    lambda: je.Grammar.lark("nothing"),
    lambda: je.Grammar.json_schema("{"),
    lambda: je.Grammar.json_schema({"type": "no such type"}),
    lambda: je.Grammar.json_schema(False),
]


def test_L4_case_C17_bad_grammars_are_refused_while_good_ones_run():
    expected, _ = serve(BATCH)
    engine, requests = begun()
    events = []
    for bad in BAD:
        with pytest.raises(ValueError, match="can't be used"):
            bad()
        events += engine.run()
    events += rest(engine)
    assert [text_of(events, request) for request in requests] == [result.text for result in expected]


UNSPELLABLE = {
    "forced": (je.Grammar.json_schema({"type": "object"}), "the tokenizer can't spell '{'"),
    "free": (je.Grammar.regex("[0-9]{2}"), "no text satisfies it"),
}


@pytest.mark.parametrize("kind", UNSPELLABLE)
def test_L4_case_C17_a_grammar_that_the_tokenizer_cannot_spell_is_refused_at_once(kind):
    """For a request and for a turn; the engine and its other requests never notice."""
    grammar, reason = UNSPELLABLE[kind]
    expected, _ = serve(BATCH)
    engine, requests = begun()
    events = engine.run()
    before = leaves(engine.state)
    with pytest.raises(ValueError, match=f"can't be used with this model: {reason}"):
        engine.create_request(je.RequestOptions(grammar=grammar))
    assert_same(leaves(engine.state), before)
    events += rest(engine)
    assert [text_of(events, request) for request in requests] == [result.text for result in expected]
    before = leaves(engine.state)
    with pytest.raises(ValueError, match=f"can't be used with this model: {reason}"):
        requests[2].begin_turn([1], je.TurnOptions(grammar=grammar))
    assert_same(leaves(engine.state), before)


@pytest.mark.parametrize("kind", UNSPELLABLE)
def test_L3_L4_through_the_core_it_ends_its_own_turn(kind):
    """The core has no model when a turn begins, so its first step tells."""
    grammar, reason = UNSPELLABLE[kind]
    engine, _handles = begun()
    state, bad = je.create_request(engine.detach(), je.RequestOptions(grammar=grammar))
    state, _ = je.begin_turn(state, bad, [1])
    with pytest.raises(je.RequestFailure, match=reason) as raised:
        je.step(MODEL, state)
    assert raised.value.request_ids == (bad,)
    engine = je.Engine(MODEL, CONFIG)
    engine.detach()
    handles = engine.attach(state)
    events = rest(engine)
    (end,) = [event for event in events if event.request is handles[bad]]
    assert end.error_code == GUIDANCE
    assert [text_of(events, handles[n]) for n in (1, 2, 3)] == [r.text for r in serve(BATCH)[0]]


@pytest.mark.parametrize(
    ("model", "sampling", "reason"),
    [
        (toy_model(eos=(EOS,)), GREEDY, "has no tokenizer; use a model with one"),
        (toy_model(text=True), GREEDY, "ends with an EOS"),
        (MODEL, dataclasses.replace(GREEDY, ignore_eos=True), "ends with an EOS"),
    ],
    ids=["no tokenizer", "no EOS", "EOS ignored"],
)
def test_L4_a_model_that_cannot_follow_grammars_says_so(model, sampling, reason):
    engine = je.Engine(model, CONFIG)
    with pytest.raises(ValueError, match=reason):
        engine.create_request(je.RequestOptions(sampling=sampling, grammar=JSON))
    request = engine.create_request(je.RequestOptions(sampling=sampling))
    before = leaves(engine.state)
    with pytest.raises(ValueError, match=reason):
        request.begin_turn([1], je.TurnOptions(grammar=JSON))
    assert_same(leaves(engine.state), before)


@pytest.mark.parametrize("forcing", [True, False], ids=["forced", "unforced"])
def test_L3_K2_a_turn_without_any_token_left_ends_behind_its_last_one(forcing):
    """The grammar can only end, which min_new_tokens forbids; forced spans change nothing of what comes before."""
    sampling = dataclasses.replace(GREEDY, min_new_tokens=40)
    batch = [Job((3, 1), je.Grammar.regex("(x|y) marks"), sampling=sampling), Job((4,), JSON)]
    if forcing:
        results, _ = serve(batch)
    else:
        with unforced():
            results, _ = serve(batch)
    assert results[0].text[1:] == " marks"
    assert (results[0].code, results[0].terminals) == (GUIDANCE, 1)
    assert results[0].detail.startswith(
        "request 1 has no token left: its grammar allows none that min_new_tokens"
    )
    assert results[1] == serve([batch[1]])[0][0]


def test_L3_a_stop_token_that_the_grammar_needs_ends_the_turn_in_a_sentence():
    """It may not end the turn there, and can't be said without ending it."""
    sampling = dataclasses.replace(GREEDY, stop_token_ids=ids("x"))
    ((result,), _) = serve([Job((3, 1), je.Grammar.regex("abxc"), sampling=sampling)])
    assert (result.text, result.code) == ("ab", GUIDANCE)
    assert "stop_token_ids" in result.detail


def test_M3_case_C6_a_draft_into_a_dead_end_changes_nothing():
    """The blank is an EOS here, so nothing can follow the `b`, which is chosen whether it is proposed or not."""
    model = toy_model(text=True, eos=(EOS, 26))
    sampling = dataclasses.replace(GREEDY, logit_bias={1: 100.0})
    ends = []
    for drafts in ([], [1], [1, 26, 2]):
        engine = je.Engine(model, CONFIG)
        grammar = je.Grammar.regex("a(b c|d)")
        request = engine.create_request(je.RequestOptions(sampling=sampling, grammar=grammar))
        request.begin_turn([3, 1], je.TurnOptions(8))
        events = engine.run()
        request.set_draft_tokens(drafts)
        events += request.stream()
        ends.append((text_of(events, request), events[-1].error_code, events[-1].usage))
    assert ends[0][:2] == ("ab", GUIDANCE)
    assert ends[1] == ends[0]
    assert ends[2] == ends[0]
