"""Two short turns on an engine, and what came of them: the setting of most tests of failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

import jaxengine as je
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL

MODEL = toy_model()
PROMPTS = ([3, 1, 4, 1, 5], [2, 7])
LIMIT = 4
ENDS = je.EngineEventFlags.TURN_FINISHED | je.EngineEventFlags.FAILED
POLICIES = pytest.mark.parametrize("policy", ["stop", "isolate"])


def started(model: je.Model = MODEL, steps: int = 1, **config: Any) -> tuple[je.Engine, list[je.Request]]:
    """An engine with both prompts begun, some steps into their turns, its events drained."""
    engine = je.Engine(model, dataclasses.replace(SMALL, **config))
    requests = [engine.create_request() for _ in PROMPTS]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        request.begin_turn(prompt, je.TurnOptions(LIMIT))
    for _ in range(steps):
        engine.run()
    return engine, requests


def run_out(engine: je.Engine) -> list[je.Event]:
    """Runs until nothing is pending, checking the invariants; returns all events."""
    events = []
    while engine.has_pending_requests():
        events += engine.run()
        je.check_invariants(engine.state)
    return events


def told(events: Iterable[je.Event]) -> list[tuple[Any, ...]]:
    """Each event as (request id or None, flags, code)."""
    return [(event.request and event.request.id, event.flags, event.error_code) for event in events]


def require_finished(requests: Iterable[je.Request]) -> None:
    """Fails unless both turns have all of their tokens, and the right ones."""
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.tokens.tolist() == prompt + continuation(prompt, LIMIT)


def require_healthy(engine: je.Engine, requests: Iterable[je.Request]) -> None:
    """Fails unless the engine goes on as if nothing had been."""
    assert engine.run(0) == []
    assert engine.has_pending_requests()
    run_out(engine)
    require_finished(requests)
