"""One thread owns an engine: calls from another are refused, questions are answered, and handles may be dropped there
(A13)."""

import inspect
import queue
import threading

import pytest

import jaxengine as je
from jaxengine import engine as engine_module
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL, assert_same, leaves

MODEL = toy_model()
PROMPT = [3, 1, 4, 1, 5]


def elsewhere(call):
    """What `call` returned or raised in another thread."""
    answers = queue.Queue()

    def run():
        try:
            answers.put(call())
        except Exception as error:
            answers.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers.get()


@pytest.fixture
def engine():
    with je.Engine(MODEL, SMALL) as engine:
        yield engine


def begun(engine, prompt=PROMPT, limit=4):
    request = engine.create_request()
    request.begin_turn(prompt, je.TurnOptions(limit))
    return request


def answered(engine, request, prompt=PROMPT, limit=4):
    while engine.has_pending_requests():
        engine.run()
        je.check_invariants(engine.state)
    return request.tokens.tolist() == prompt + continuation(prompt, limit)


ENGINE_CALLS = {
    "apply": lambda engine, request: engine.apply(je.drain, 1),
    "attach": lambda engine, request: engine.attach(engine.state),
    "close": lambda engine, request: engine.close(),
    "create_request": lambda engine, request: engine.create_request(),
    "detach": lambda engine, request: engine.detach(),
    "has_pending_requests": lambda engine, request: engine.has_pending_requests(),
    "prepare": lambda engine, request: engine.prepare(None),
    "pull": lambda engine, request: engine.pull(request),
    "run": lambda engine, request: engine.run(),
    "run(0)": lambda engine, request: engine.run(0),
    "stream": lambda engine, request: next(iter(engine.stream())),
    "__exit__": lambda engine, request: engine.__exit__(None, None, None),
}
REQUEST_CALLS = {
    "begin_turn": lambda engine, request: request.begin_turn([1]),
    "cancel_turn": lambda engine, request: request.cancel_turn(1),
    "close": lambda engine, request: request.close(),
    "set_draft_tokens": lambda engine, request: request.set_draft_tokens([]),
    "stream": lambda engine, request: next(iter(request.stream())),
}
QUESTIONS = {
    "model": lambda engine, request: engine.model,
    "has_state": lambda engine, request: engine.has_state,
    "state": lambda engine, request: engine.state,
    "state_of": lambda engine, request: engine.state_of(request),
    "metrics": lambda engine, request: engine.metrics,
    "max_draft_tokens_per_proposal": lambda engine, request: engine.max_draft_tokens_per_proposal(),
    "id": lambda engine, request: request.id,
    "status": lambda engine, request: request.status,
    "length": lambda engine, request: request.length,
    "processed_length": lambda engine, request: request.processed_length,
    "turn_id": lambda engine, request: request.turn_id,
    "max_session_tokens": lambda engine, request: request.max_session_tokens,
    "tokens": lambda engine, request: request.tokens.tolist(),
    "repr": lambda engine, request: repr(request),
}
"""They read the one immutable value that the engine holds, so whenever they come they see a whole state."""


@pytest.mark.parametrize(("owner", "calls"), [(je.Engine, ENGINE_CALLS), (je.Request, REQUEST_CALLS)])
def test_A13_the_tables_here_name_every_public_member(owner, calls):
    members = {name for name, _ in inspect.getmembers(owner) if not name.startswith("_")}
    assert members <= calls.keys() | QUESTIONS.keys()


CALLS = [*ENGINE_CALLS.items(), *REQUEST_CALLS.items()]


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
def test_A13_a_call_from_another_thread_is_refused_and_does_nothing(engine, call, retained):
    request, dropped = begun(engine), begun(engine, [7])
    if retained:
        engine.run(1)
    before = leaves(engine.state)
    del dropped
    error = elsewhere(lambda: call(engine, request))
    assert isinstance(error, je.EngineError)
    assert str(error) == "the engine belongs to the thread that made it; call it from there"
    assert_same(before, leaves(engine.state))
    assert answered(engine, request)


@pytest.mark.parametrize("call", QUESTIONS.values(), ids=QUESTIONS)
def test_A13_a_question_from_another_thread_is_answered_even_in_the_middle_of_a_commit(
    engine, monkeypatch, call
):
    """The donated store is gone and the next state not yet there; what is told is the state before."""
    request = begun(engine)
    engine.run()
    told, commit = [], engine_module.commit

    def commit_and_ask(*arguments):
        before = call(engine, request)
        result = commit(*arguments)
        told.append((before, elsewhere(lambda: call(engine, request))))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "commit", commit_and_ask)
        engine.run()
    ((before, during),) = told
    assert during == before or during is before
    assert answered(engine, request)


@pytest.mark.parametrize("call", QUESTIONS.values(), ids=QUESTIONS)
def test_A12_A13_a_tombstone_answers_in_any_thread(engine, call):
    request = begun(engine)
    engine.close()
    here, there = (ask(lambda: call(engine, request)) for ask in (told, elsewhere))
    assert (type(here), str(here)) == (type(there), str(there))
    of_the_state = [QUESTIONS[name] for name in ("state", "metrics", "max_draft_tokens_per_proposal")]
    assert isinstance(here, je.EngineError) == (call in of_the_state)


def told(call):
    try:
        return call()
    except je.EngineError as error:
        return error


def test_A13_leaving_the_with_block_elsewhere_keeps_the_error_that_led_there(engine):
    def leave():
        with engine:
            raise ZeroDivisionError

    error = elsewhere(leave)
    assert isinstance(error, je.EngineError)
    assert isinstance(error.__context__, ZeroDivisionError)
    assert engine.has_state


def test_A12_A13_dropping_the_last_handle_elsewhere_only_queues_its_id(engine):
    handles, other = [begun(engine)], begun(engine, [7])
    engine.run(1)
    before = leaves(engine.state)
    elsewhere(handles.clear)
    assert_same(before, leaves(engine.state))
    assert list(engine._abandoned) == [1]
    assert engine.has_pending_requests()
    assert engine.state.control.requests.id.tolist() == [other.id]
    assert answered(engine, other, [7])


def test_A13_the_last_event_may_be_dropped_elsewhere_too(engine):
    request = begun(engine)
    events = engine.run()
    del request
    assert engine.has_pending_requests()
    elsewhere(events.clear)
    assert not engine.has_pending_requests()
    assert engine.metrics.free_blocks == SMALL.num_blocks


def test_A13_many_threads_drop_handles_while_the_owner_serves(engine):
    """Whenever they come, each request is either finished or gone, and nothing is left over."""
    other = begun(engine, limit=20)
    handles = [[begun(engine, [number], 20)] for number in range(12)]
    start = threading.Barrier(5)

    def drop(mine):
        start.wait()
        for handle in mine:
            handle.clear()

    threads = [threading.Thread(target=drop, args=(handles[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    assert answered(engine, other, limit=20)
    for thread in threads:
        thread.join()
    assert not engine.has_pending_requests()
    assert engine.state.control.requests.id.tolist() == [other.id]


def test_A13_an_engine_lives_in_whatever_thread_makes_it():
    def serve():
        with je.Engine(MODEL, SMALL) as engine:
            return answered(engine, begun(engine))

    assert elsewhere(serve) is True
