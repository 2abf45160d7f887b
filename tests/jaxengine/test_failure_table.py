"""The table of docs/failures.md, line by line, against what engines do (B11).

Each function below brings an engine to one outcome and returns it with the events that tell of it.
"""

import dataclasses
import re
from pathlib import Path

import pytest

import jaxengine as je
from jaxengine.toy import NAN, next_token, toy_model, toy_tokenizer
from tests.jaxengine.breaking import Stage, breaking, raising_for
from tests.jaxengine.harness import SMALL

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
HEADS = ["Outcome", "Flags", "Finish reason", "Error code", "Of", "Engine after"]
MODEL = toy_model()
GREEDY = je.SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4]


def pinned():
    """{outcome: [(flags, reason, code, of, engine after), ...]} as the page has it."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in PAGE.read_text().splitlines()]
    start = rows.index(HEADS) + 2
    table = {}
    for row in rows[start : rows.index([""], start)]:
        assert len(row) == len(HEADS)
        outcome, flags, reason, code, of, after = row
        cells = (frozenset(re.findall(r"`(\w+)`", flags)), reason.strip("`"), code.strip("`"), of, after)
        table.setdefault(outcome, []).append(cells)
    return table


def engine_with(*prompts, model=MODEL, limit=9, session=None, sampling=GREEDY, grammar=None, **config):
    engine = je.Engine(model, dataclasses.replace(SMALL, **config))
    options = je.RequestOptions(session, sampling, grammar)
    requests = [engine.create_request(options) for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    return engine, requests


def token():
    engine, requests = engine_with(PROMPT)
    return engine, engine.run(), requests


def eos():
    engine, requests = engine_with(PROMPT, model=toy_model(eos=[next_token(PROMPT)]))
    return engine, engine.run(), requests


def stop_string():
    letter = toy_tokenizer().decode([next_token(PROMPT)])
    sampling = je.SamplingParams(temperature=0.0, stop=letter)
    engine, requests = engine_with(PROMPT, model=toy_model(text=True), sampling=sampling)
    return engine, engine.run(), requests


def limit_of_turn():
    engine, requests = engine_with(PROMPT, limit=1)
    return engine, engine.run(), requests


def limit_of_session():
    engine, requests = engine_with(PROMPT, session=4)
    return engine, engine.run(), requests


def cut_before_its_grammar_ended():
    model = toy_model(text=True, eos=[27])
    engine, requests = engine_with(PROMPT, model=model, limit=1, grammar=je.Grammar.regex("ab"))
    return engine, engine.run(), requests


def cancelled():
    engine, requests = engine_with(PROMPT)
    requests[0].cancel_turn(1)
    return engine, engine.run(), requests


def partial_prefill():
    engine, requests = engine_with([1] * 40)
    return engine, engine.run(), requests


def capacity_blocked():
    engine, requests = engine_with([1] * 14, [2] * 14, limit=1, num_blocks=4)
    engine.run()
    return engine, engine.run(), requests


def unserviceable():
    engine, requests = engine_with([1] * 40, num_blocks=2)
    return engine, engine.run(), requests


def retryable():
    engine, requests = engine_with([NAN])
    return engine, engine.run(), requests


def row_failed():
    engine, requests = engine_with([NAN])
    for _ in range(SMALL.max_row_retries):
        engine.run()
    return engine, engine.run(), requests


def grammar_failed():
    """It needs what min_new_tokens forbids."""
    model = toy_model(text=True, eos=[27])
    sampling = je.SamplingParams(min_new_tokens=9)
    engine, requests = engine_with(PROMPT, model=model, sampling=sampling, grammar=je.Grammar.regex("a"))
    assert [event.token for event in engine.run()] == [0]
    return engine, engine.run(), requests


def faulty(stage, error, *prompts, **config):
    engine, requests = engine_with(*prompts, **config)
    with je.inject_fault(stage, error) as fault:
        events = engine.run()
    assert fault.fired
    return engine, events, requests


def planning_failure():
    engine, requests = engine_with(PROMPT)
    with je.inject_fault(Stage.PLAN, MemoryError()), pytest.raises(MemoryError):
        engine.run()
    return engine, [], requests


def failed_alone():
    engine, requests = engine_with(PROMPT, model=breaking(MODEL, raising_for(1)), failure_policy="isolate")
    engine.run()
    return engine, engine.run(), requests


UNKNOWN = RuntimeError("who knows")
OUTCOMES = {
    "token": token,
    "turn complete: EOS": eos,
    "turn complete: stop string": stop_string,
    "turn complete: limit of the turn": limit_of_turn,
    "turn complete: limit of the session": limit_of_session,
    "turn complete: cut before its grammar ended": cut_before_its_grammar_ended,
    "turn complete: cancelled": cancelled,
    "partial prefill": partial_prefill,
    "capacity blocked": capacity_blocked,
    "unserviceable": unserviceable,
    "retryable": retryable,
    "row failed after its retries": row_failed,
    "grammar that can't go on": grammar_failed,
    "execution out of memory": lambda: faulty(Stage.EXECUTE, MemoryError(), PROMPT),
    "planning failure": planning_failure,
    "contract failure": lambda: faulty(Stage.RESERVE, UNKNOWN, PROMPT),
    "execution failure": lambda: faulty(Stage.EXECUTE, UNKNOWN, PROMPT),
    "store lost": lambda: faulty(Stage.PUBLISH, UNKNOWN, PROMPT),
    "failure with nothing live": lambda: faulty(Stage.PLAN, je.ContractError("two owners of a block")),
    "isolate: unknown failure": lambda: faulty(Stage.EXECUTE, UNKNOWN, PROMPT, failure_policy="isolate"),
    "isolate: failed alone": failed_alone,
}


def health(engine):
    try:
        engine.run(0)
    except je.EngineError:
        return "stopped"
    return "healthy"


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_B11_each_outcome_has_the_events_that_the_page_says(outcome):
    engine, events, requests = OUTCOMES[outcome]()
    after = health(engine)
    assert all(event.request in (None, *requests) for event in events)
    told = [
        (
            frozenset(flag.name for flag in event.flags),
            event.finish_reason.name,
            event.error_code.name,
            "engine" if event.request is None else "request",
            after,
        )
        for event in events
    ]
    assert pinned()[outcome] == (told or [(frozenset(), "", "", "", after)])


def test_B11_the_page_and_this_file_know_the_same_outcomes():
    assert list(pinned()) == list(OUTCOMES)


def test_B11_every_code_flag_and_reason_has_its_line():
    lines = [line for lines in pinned().values() for line in lines]
    flags, reasons, codes = (
        frozenset().union(*(line[0] for line in lines)),
        {line[1] for line in lines if line[1]},
        {line[2] for line in lines if line[2]},
    )
    assert flags == {flag.name for flag in je.EngineEventFlags}
    assert reasons == {reason.name for reason in je.FinishReason}
    assert codes == {code.name for code in je.EngineErrorCode}


def test_the_example_of_the_page_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
