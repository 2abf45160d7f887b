"""What a request is made with, which ways it goes from state to state, and how its turns end (A1, A2, A7)."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.toy import CONTEXT, LETTERS, continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves
from tests.jaxengine.scripts import MODEL as SCRIPTED
from tests.jaxengine.scripts import apply, commands, executable

MODEL = toy_model()
CREATED, QUEUED, ACTIVE, COMPLETE, CLOSED = je.RequestStatus

# A2: every way from state to state

STEP = {
    QUEUED: {QUEUED, ACTIVE, COMPLETE},
    ACTIVE: {QUEUED, ACTIVE, COMPLETE},  # back to the queue when it makes room for an older one
}
CALL = {
    "continue": {COMPLETE: {QUEUED, COMPLETE}, CREATED: {QUEUED}},
    "cancel": {QUEUED: {COMPLETE}, ACTIVE: {COMPLETE}},
    "close": {status: {CLOSED} for status in je.RequestStatus},
    "drain": {},
    "new": {},
}


def statuses(state):
    requests = state.control.requests
    return dict(zip(requests.id.tolist(), map(je.RequestStatus, requests.status), strict=True))


@given(script=commands)
@settings(max_examples=40)
def test_A2_a_request_goes_only_the_ways_there_are_and_a_call_moves_one_at_most(script):
    state = je.init_state(SCRIPTED, SMALL)
    for command in script:
        before = statuses(state)
        if command != ("step",):
            state = apply(state, command)
        elif plan := executable(state):
            state, _ = je.commit(state, je.execute(SCRIPTED, state, plan))
        after = statuses(state)
        moved = [
            (old, after.get(number, CLOSED))
            for number, old in before.items()
            if after.get(number, CLOSED) != old
        ]
        ways = STEP if command == ("step",) else CALL[command[0]]
        assert all(new in ways.get(old, {}) for old, new in moved)
        assert command == ("step",) or len(moved) <= 1
        assert all(after[number] == QUEUED for number in after.keys() - before.keys())


# A1: what a request was made with


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "batch_size"])
@pytest.mark.parametrize("value", [0, 2, -1, 1.5, "1", [1], {"a": 1}])
def test_A1_a_folder_that_asks_for_anything_but_one_sequence_is_refused_by_name(name, value):
    with je.Engine(toy_model(search={name: value}), SMALL) as engine:
        before = leaves(engine.state)
        with pytest.raises(
            ValueError, match=rf"search\.{name} of the model folder is .*; a request is one sequence"
        ):
            engine.create_request()
        assert_same(before, leaves(engine.state))
    for one in (1, 1.0, None):
        with je.Engine(toy_model(search={name: one}), SMALL) as engine:
            assert engine.create_request().id == 1


def test_A1_K4_a_setting_of_the_folder_that_is_a_list_is_refused_where_it_is_needed():
    with je.Engine(toy_model(search={"temperature": [0.5], "do_sample": True}), SMALL) as engine:
        with pytest.raises(
            TypeError, match=r"search\.temperature of the model folder is '\[0\.5\]'; give a number"
        ):
            engine.create_request()
        engine.create_request(je.RequestOptions(sampling=je.SamplingParams(temperature=0.5)))


def test_A1_options_are_copied_when_the_request_and_the_turn_begin():
    """Frozen values can only be changed by force; even then the request keeps what it was made with."""
    sampling = je.SamplingParams(temperature=0.0, seed=3)
    options, turn = je.RequestOptions(12, sampling), je.TurnOptions(4)
    with je.Engine(MODEL, SMALL) as engine:
        request = engine.create_request(options)
        for target, name, value in (
            (options, "max_session_tokens", 64),
            (options, "sampling", je.SamplingParams(temperature=5.0)),
            (sampling, "temperature", 5.0),
            (sampling, "seed", 9),
        ):
            object.__setattr__(target, name, value)
        request.begin_turn([1, 2], turn)
        object.__setattr__(turn, "max_generated_tokens", 1)
        while engine.has_pending_requests():
            engine.run()
        assert request.max_session_tokens == 12
        assert request.tokens.tolist() == [1, 2, *continuation([1, 2], 4)]
        with pytest.raises(ValueError, match="13 tokens of at most 12"):
            request.begin_turn([1] * 7)


@given(
    refusals=st.lists(st.sampled_from(["limit", "type", "closed", "kept"]), max_size=8),
)
@settings(max_examples=20)
def test_A1_ids_count_the_requests_that_were_made_and_no_refusal(refusals):
    with je.Engine(MODEL, SMALL) as engine:
        made, kept = 0, []
        for kind in refusals:
            if kind in ("limit", "type"):
                with pytest.raises((ValueError, TypeError)):
                    engine.create_request(je.RequestOptions(CONTEXT + 1) if kind == "limit" else 5)
                continue
            made += 1
            request = engine.create_request()
            assert request.id == made
            if kind == "closed":
                request.close()
            kept.append(request)
        assert engine.create_request().id == made + 1


# A7: one end a turn, at the limit exactly


@given(
    prompt=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=20),
    limits=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    eos_after=st.none() | st.integers(0, 5),
)
@settings(max_examples=40)
def test_A7_a_turn_ends_at_the_first_of_its_limits_by_the_first_reason_that_holds(prompt, limits, eos_after):
    most, room = limits
    answer = continuation(prompt, 7)
    eos = [answer[eos_after]] if eos_after is not None else []
    engine = je.Engine(toy_model(eos=eos), SMALL)
    request = engine.create_request(je.RequestOptions(len(prompt) + 1 + room))
    request.begin_turn(prompt, je.TurnOptions(most))
    events = list(request.stream())
    visible = answer[: answer.index(eos[0])] if eos else answer
    count = min(len(visible), most or 99, room + 1)
    reason = (
        je.FinishReason.EOS
        if eos and count == len(visible) < min(most or 99, room + 1)
        else je.FinishReason.MAX_GENERATED_TOKENS
        if count == most
        else je.FinishReason.MAX_SESSION_TOKENS
    )
    assert request.tokens.tolist() == prompt + visible[:count]
    assert [event.token for event in events if event.flags & je.EngineEventFlags.TOKEN] == visible[:count]
    assert [event.finish_reason for event in events if event.finish_reason] == [reason]
    assert events[-1].finish_reason == reason
    assert events[-1].usage == je.Usage(len(prompt), count)
    assert np.all(np.isin(eos, request.tokens[len(prompt) :], invert=True))
