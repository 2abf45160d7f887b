"""Every public call with what it must refuse: the error's words, the state as it was, and an engine that goes on
(A4, A6, T2)."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxengine as je
from jaxengine.requests import status_of
from jaxengine.toy import CONTEXT, VOCAB, continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, begun, leaves

MODEL = toy_model()
LIVE, DONE, NEW, CLOSED, NEVER = 1, 2, 3, 4, 99
"""Ids in the state below; the last one was never given out."""


@pytest.fixture
def engine():
    """One request in each state, their handles kept."""
    engine = je.Engine(MODEL, SMALL)
    handles = [engine.create_request() for _ in range(4)]
    handles[0].begin_turn([1, 2, 3], je.TurnOptions(8))
    handles[1].begin_turn([4, 5], je.TurnOptions(1))
    handles[3].close()
    engine.run()
    engine.handles = handles
    yield engine
    engine.close()


FLAT = "give a flat sequence of integers"
TOKENS = [
    ("none", list, ValueError, "the turn has no tokens; give at least one"),
    (
        "none in an array",
        lambda: np.zeros(0, np.int32),
        ValueError,
        "the turn has no tokens; give at least one",
    ),
    ("none in an empty generator", lambda: iter(()), ValueError, FLAT),
    ("a generator", lambda: (token for token in [1, 2]), ValueError, FLAT),
    ("a set", lambda: {1, 2}, ValueError, FLAT),
    ("a text", lambda: "1 2", ValueError, FLAT),
    ("texts", lambda: ["1", "2"], ValueError, FLAT),
    ("bytes", lambda: b"12", ValueError, FLAT),
    ("nothing", lambda: None, ValueError, FLAT),
    ("a hole", lambda: [1, None], ValueError, FLAT),
    ("one number", lambda: 7, ValueError, FLAT),
    ("a batch of one", lambda: [[1, 2]], ValueError, FLAT),
    ("a ragged batch", lambda: [[1, 2], [3]], ValueError, "no flat sequence of integers"),
    ("floats", lambda: [1.0, 2.0], ValueError, FLAT),
    ("one float", lambda: [1, 2.5], ValueError, FLAT),
    ("not a number", lambda: [float("nan")], ValueError, FLAT),
    ("booleans", lambda: [True, False], ValueError, FLAT),
    ("a mask", lambda: np.ones(3, bool), ValueError, FLAT),
    ("floats on a device", lambda: jnp.ones(3), ValueError, FLAT),
    (
        "negative",
        lambda: [1, -1],
        ValueError,
        f"token -1 is outside the vocabulary of {VOCAB}; give ids from 0 to {VOCAB - 1}",
    ),
    ("the first beyond", lambda: [VOCAB, 1], ValueError, f"token {VOCAB} is outside the vocabulary"),
    ("64 bits", lambda: [2**40], ValueError, f"token {2**40} is outside the vocabulary"),
    (
        "would wrap to 0",
        lambda: np.array([2**32], np.uint64),
        ValueError,
        f"token {2**32} is outside the vocabulary",
    ),
    ("more than 64 bits", lambda: [2**70], ValueError, FLAT),
    ("too many", lambda: [1] * CONTEXT, ValueError, f"would hold {CONTEXT} tokens of at most {CONTEXT}"),
    ("far too many", lambda: np.zeros(10**6, np.int8), ValueError, "would hold 1000000 tokens of at most"),
]


@pytest.mark.parametrize(("make", "error", "words"), [t[1:] for t in TOKENS], ids=[t[0] for t in TOKENS])
def test_A3_A4_A6_tokens_that_are_none(engine, make, error, words):
    request = engine.handles[2]
    before = leaves(engine.state)
    with pytest.raises(error, match=re.escape(words)):
        request.begin_turn(make())
    with pytest.raises(error, match=re.escape(words)):
        je.begin_turn(engine.state, NEW, make())
    assert_same(before, leaves(engine.state))
    assert request.status == je.RequestStatus.CREATED
    still_serves(engine, request)


def still_serves(engine, request):
    """The request can begin, and the one that was running ends with the tokens it always had."""
    assert request.begin_turn([9], je.TurnOptions(2)) == 1
    while engine.has_pending_requests():
        engine.run()
    je.check_invariants(engine.state)
    assert request.tokens.tolist() == [9, *continuation([9], 2)]
    assert engine.handles[0].tokens.tolist() == [1, 2, 3, *continuation([1, 2, 3], 8)]


UNKNOWN = f"there is no request {NEVER}; use an id"
CORE = [
    (je.create_request, ({"max_session_tokens": 4},), TypeError, "give RequestOptions or nothing"),
    (je.create_request, (je.TurnOptions(),), TypeError, "give RequestOptions or nothing"),
    (
        je.create_request,
        (je.RequestOptions(CONTEXT + 1),),
        ValueError,
        f"is {CONTEXT + 1}; this model allows at most {CONTEXT}",
    ),
    (je.begin_turn, (NEW, [1], je.RequestOptions()), TypeError, "give TurnOptions or nothing"),
    (je.begin_turn, (NEW, [1], 16), TypeError, "the options are 16; give TurnOptions or nothing"),
    (je.begin_turn, (LIVE, [1]), je.RequestStateError, "request 1 is ACTIVE; begin a turn once"),
    (je.begin_turn, (CLOSED, [1]), je.RequestStateError, "request 4 is CLOSED; create a new request"),
    (je.begin_turn, (NEVER, [1]), ValueError, UNKNOWN),
    (je.begin_turn, (0, [1]), ValueError, "there is no request 0"),
    (je.begin_turn, (-1, [1]), ValueError, "there is no request -1"),
    (je.begin_turn, (2**64, [1]), ValueError, f"there is no request {2**64}"),
    (je.begin_turn, ("3", [1]), TypeError, "request id '3' is no integer"),
    (je.begin_turn, (3.0, [1]), TypeError, "request id 3.0 is no integer"),
    (je.begin_turn, (None, [1]), TypeError, "request id None is no integer"),
    (je.begin_turn, (True, [1]), TypeError, "request id True is no integer"),
    (je.cancel_turn, (NEW, 1), je.RequestStateError, "request 3 has had no turn yet"),
    (je.cancel_turn, (CLOSED, 1), je.RequestStateError, "request 4 is CLOSED"),
    (je.cancel_turn, (NEVER, 1), ValueError, UNKNOWN),
    (je.cancel_turn, (-1, 1), ValueError, "there is no request -1"),
    (je.close_request, (NEVER,), ValueError, UNKNOWN),
    (je.close_request, (-1,), ValueError, "there is no request -1"),
    (je.close_request, ("1",), TypeError, "request id '1' is no integer"),
    (status_of, (NEVER,), ValueError, UNKNOWN),
    (status_of, (None,), TypeError, "request id None is no integer"),
    (je.drain, (-1,), ValueError, "the number of events to drain is -1; give a value from 0"),
    (je.drain, (1.5,), TypeError, "the number of events to drain is 1.5; give an integer"),
    (je.drain, (None,), TypeError, "the number of events to drain is None; give an integer"),
    (je.drain, (2**63,), ValueError, "the number of events to drain is 9223372036854775808"),
    (je.drain, (1, NEVER), ValueError, UNKNOWN),
    (je.drain, (1, 0), ValueError, "there is no request 0"),
    (je.drain, (1, "1"), TypeError, "request id '1' is no integer"),
    (je.drain, (1, True), TypeError, "request id True is no integer"),
    (je.commit, (None,), TypeError, "the transaction is a NoneType; give what execute returned"),
    (je.commit, (je.Usage(),), TypeError, "the transaction is a Usage; give what execute returned"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"), CORE, ids=lambda value: getattr(value, "__name__", None)
)
def test_A4_A8_what_the_core_refuses_changes_nothing(engine, call, arguments, error, words):
    before = leaves(engine.state)
    with pytest.raises(error, match=re.escape(words)):
        call(engine.state, *arguments)
    assert_same(before, leaves(engine.state))
    still_serves(engine, engine.handles[2])


STATE_CALLS = {
    "create_request": je.create_request,
    "begin_turn": lambda state: je.begin_turn(state, LIVE, [1]),
    "cancel_turn": lambda state: je.cancel_turn(state, LIVE, 1),
    "close_request": lambda state: je.close_request(state, LIVE),
    "drain": lambda state: je.drain(state, 1),
    "plan_step": je.plan_step,
    "execute": lambda state: je.execute(MODEL, state, None),
    "commit": lambda state: je.commit(state, None),
    "step": lambda state: je.step(MODEL, state),
    "check_invariants": je.check_invariants,
}


@pytest.mark.parametrize("call", STATE_CALLS.values(), ids=STATE_CALLS)
@pytest.mark.parametrize("state", [None, MODEL, SMALL, 7, {}], ids=lambda value: type(value).__name__)
def test_T2_what_is_no_state_is_refused_by_every_function_of_the_core(call, state):
    with pytest.raises(TypeError, match=f"the state is a {type(state).__name__}; give an EngineState"):
        call(state)


@pytest.mark.parametrize("call", STATE_CALLS.values(), ids=STATE_CALLS)
def test_T2_the_pair_that_a_call_returned_is_no_state(engine, call):
    before = leaves(engine.state)
    with pytest.raises(TypeError, match=r"the state is a tuple; .* return in front of their result"):
        call(je.create_request(engine.state))
    assert_same(before, leaves(engine.state))


def planned(state):
    return je.plan_step(state)


EXECUTE = [
    (lambda state: (None, state, planned(state)), TypeError, "the model is None; give what load_model"),
    (lambda state: (state, MODEL, planned(state)), TypeError, "the model is EngineState("),
    (lambda state: (MODEL, state, None), TypeError, "the plan is a NoneType; give what plan_step returned"),
    (
        lambda state: (MODEL, state, planned(state).rows),
        TypeError,
        "the plan is a tuple; give what plan_step",
    ),
    (
        lambda state: (MODEL, state, je.plan_step(je.init_state(MODEL, SMALL))),
        ValueError,
        "a plan of outcome NO_WORK has nothing to execute",
    ),
    (
        lambda state: (MODEL, state, je.plan_step(begun(MODEL, [1]))),
        ValueError,
        "the plan does not fit this state",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), EXECUTE)
def test_T2_what_execute_refuses_changes_nothing(engine, make, error, words):
    before = leaves(engine.state)
    with pytest.raises(error, match=re.escape(words)):
        je.execute(*make(engine.state))
    assert_same(before, leaves(engine.state))
    still_serves(engine, engine.handles[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, SMALL), "the model is None; give what load_model returned"),
        (("folder", SMALL), "the model is 'folder'; give what load_model returned"),
        ((SMALL, MODEL), "the model is EngineConfig("),
        ((MODEL, None), "the config is None; give an EngineConfig"),
        ((MODEL, {"num_blocks": 4}), "the config is {'num_blocks': 4}; give an EngineConfig"),
        ((MODEL, je.RequestOptions()), "the config is RequestOptions("),
    ],
)
def test_T2_a_state_is_made_of_a_model_and_a_config(arguments, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        je.init_state(*arguments)


def raising(state):
    raise ZeroDivisionError("of the caller")


ENGINE = [
    (lambda engine: engine.run(2**63), ValueError, "max_events is 9223372036854775808; give a value from 0"),
    (lambda engine: engine.attach(None), je.EngineError, "the engine has a state; detach it first"),
    (lambda engine: engine.apply(raising), ZeroDivisionError, "of the caller"),
    (lambda engine: engine.apply(je.drain, -1), ValueError, "the number of events to drain is -1"),
    (lambda engine: engine.apply(je.close_request, NEW), TypeError, "cannot unpack"),
    (lambda engine: engine.run(-1), ValueError, "max_events is -1; give a value from 0"),
    (lambda engine: engine.run(1.5), TypeError, "max_events is 1.5; give an integer"),
    (lambda engine: engine.run(None), TypeError, "max_events is None; give an integer"),
    (lambda engine: engine.run(True), TypeError, "max_events is True; give an integer"),
    (lambda engine: engine.run("all"), TypeError, "max_events is 'all'; give an integer"),
    (lambda engine: engine.create_request(SMALL), TypeError, "give RequestOptions or nothing"),
    (lambda engine: engine.create_request(je.SamplingParams()), TypeError, "give RequestOptions or nothing"),
    (
        lambda engine: engine.handles[2].begin_turn([1], {"max_generated_tokens": 3}),
        TypeError,
        "give TurnOptions or nothing",
    ),
    (lambda engine: engine.handles[0].begin_turn([1]), je.RequestStateError, "ACTIVE"),
    (lambda engine: engine.handles[3].begin_turn([1]), je.RequestStateError, "CLOSED"),
    (lambda engine: engine.handles[2].cancel_turn(1), je.RequestStateError, "no turn yet"),
    (lambda engine: engine.handles[3].cancel_turn(1), je.RequestStateError, "CLOSED"),
]


@pytest.mark.parametrize(("call", "error", "words"), ENGINE)
def test_T2_what_the_engine_refuses_changes_nothing(engine, call, error, words):
    before, metrics = leaves(engine.state), engine.metrics
    with pytest.raises(error, match=re.escape(words)):
        call(engine)
    assert_same(before, leaves(engine.state))
    assert engine.metrics == metrics
    still_serves(engine, engine.handles[2])


@pytest.mark.parametrize("turn_id", ["1", None, 1.5, "", -1, 2**64])
def test_A8_a_turn_id_that_is_none_cancels_nothing(engine, turn_id):
    before = leaves(engine.state)
    assert not engine.handles[0].cancel_turn(turn_id)
    assert_same(before, leaves(engine.state))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("folder",), "the model is 'folder'; give what load_model returned"),
        ((None,), "the model is None"),
        ((MODEL.decoder,), "give what load_model returned"),
        ((MODEL, {"num_blocks": 4}), "give an EngineConfig"),
        ((MODEL, 4), "the config is 4; give an EngineConfig"),
    ],
)
def test_T2_an_engine_needs_a_model_and_a_config(arguments, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        je.Engine(*arguments)
