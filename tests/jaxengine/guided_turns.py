"""Turns of the toy model under grammars of a few words, and what they must say, worked out without the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jaxengine as je
from jaxengine.toy import logits_after, toy_model, toy_tokenizer
from tests.jaxengine.harness import SMALL

EOS = 27
MODEL = toy_model(text=True, eos=(EOS,))
CONFIG = dataclasses.replace(SMALL, check_invariants=True)
GREEDY = je.SamplingParams(temperature=0.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz "
ENDED = je.EngineEventFlags.TURN_FINISHED

WORDS = {
    "regex": (je.Grammar.regex("cat|car|caramel|dog"), ("cat", "car", "caramel", "dog")),
    "lark": (
        je.Grammar.lark('start: ("a" | "b") " then " ("c" | "d")'),
        ("a then c", "a then d", "b then c", "b then d"),
    ),
    "json": (je.Grammar.json_schema({"enum": [True, False, None]}), ("true", "false", "null")),
    "forced": (
        je.Grammar.regex("(x|y) marks the spot( again)?"),
        tuple(f"{x} marks the spot{y}" for x in "xy" for y in ("", " again")),
    ),
}
"""Grammars of finite languages, and all that they allow."""


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode(text)


def said(prompt: Sequence[int], words: Sequence[str], limit: int = 0) -> str:
    """The arg-max turn among `words`: at each letter the best that one of them goes on with."""
    text = ""
    while not limit or len(text) < limit:
        allowed = {EOS if word == text else ids(word)[len(text)] for word in words if word.startswith(text)}
        logits = logits_after([*prompt, *ids(text)])
        token = max(sorted(allowed), key=lambda token: logits[token])
        if token == EOS:
            break
        text += LETTERS[token]
    return text


@dataclasses.dataclass(frozen=True)
class Job:
    """A request of one turn."""

    prompt: tuple[int, ...]
    grammar: je.Grammar | None = None
    limit: int = 0
    sampling: je.SamplingParams = GREEDY
    proposer: je.NgramDrafts | None = None


@dataclasses.dataclass
class Result:
    """What came of a job; logprobs are those of its tokens."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    reason: je.FinishReason = je.FinishReason.NONE
    code: je.EngineErrorCode = je.EngineErrorCode.NONE
    detail: str = ""
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    terminals: int = 0
    incomplete: bool = False

    def take(self, event: je.Event) -> None:
        if je.EngineEventFlags.TOKEN in event.flags:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprobs)
        self.text += event.text
        if ENDED in event.flags:
            self.reason, self.code, self.detail = event.finish_reason, event.error_code, event.detail
            self.terminals += 1
            self.incomplete = je.EngineEventFlags.GRAMMAR_INCOMPLETE in event.flags
        else:
            assert je.EngineEventFlags.GRAMMAR_INCOMPLETE not in event.flags


def serve(
    jobs: Sequence[Job], config: je.EngineConfig = CONFIG, model: je.Model = MODEL
) -> tuple[list[Result], je.Engine]:
    """Runs the jobs side by side to their ends; each keeps its number as its seed."""
    engine = je.Engine(model, config)
    results: dict[int, Result] = {}
    requests = []
    for job in jobs:
        options = je.RequestOptions(sampling=job.sampling, grammar=job.grammar, proposer=job.proposer)
        requests.append(engine.create_request(options))
        requests[-1].begin_turn(job.prompt, je.TurnOptions(job.limit))
        results[requests[-1].id] = Result()
    while engine.has_pending_requests():
        for event in engine.run():
            if event.request is not None:
                results[event.request.id].take(event)
                if ENDED in event.flags:
                    event.request.close()
    return list(results.values()), engine


@contextlib.contextmanager
def broken(model: je.Model, method: str, *errors: Exception | None) -> Iterator[list[Any]]:
    """Makes a method of the model's guides raise `errors` in turn, None for a call that works; yields its calls."""
    guides = model.guides
    assert guides is not None
    real, waiting, calls = getattr(guides, method), list(errors), []

    def stand_in(*arguments: Any) -> Any:
        calls.append(arguments)
        error = waiting.pop(0) if waiting else None
        if error is not None:
            raise error
        return real(*arguments)

    setattr(guides, method, stand_in)
    try:
        yield calls
    finally:
        delattr(guides, method)


@contextlib.contextmanager
def unforced(model: je.Model = MODEL) -> Iterator[None]:
    """Forced spans are not looked for."""
    guides = model.guides
    assert guides is not None
    guides.forced = lambda grammar, tokens: ()  # type: ignore[method-assign]
    try:
        yield
    finally:
        del guides.forced  # type: ignore[method-assign]
