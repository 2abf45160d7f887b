"""Steps that fail on purpose, and what a caller does then: a driver that goes on, and programs that raise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jaxengine as je
from jaxengine.programs import Programs
from jaxengine.sampling import SamplingRows

Flags, Code, Stage = je.EngineEventFlags, je.EngineErrorCode, je.Stage

KINDS: Mapping[str, Callable[[], Exception]] = {
    "retryable": lambda: je.RetryableStepError("try again"),
    "memory": lambda: MemoryError("no room"),
    "device memory": lambda: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"),
    "unknown": lambda: RuntimeError("who knows"),
}
"""The kinds of error, by name; each call makes a new one."""

FAULTS = tuple(itertools.product(Stage, KINDS))
"""Every stage with every kind."""


def outcome(stage: Stage, kind: str) -> je.StepOutcome | None:
    """What a step comes to with a fault; None where planning fails and the error reaches the caller as it is."""
    if stage is Stage.PUBLISH:
        return je.StepOutcome.FATAL_EXECUTION_FAILURE
    if kind == "retryable":
        return je.StepOutcome.RETRYABLE_BATCH_ABORT
    if stage is Stage.PLAN:
        return None
    if kind != "unknown":
        return je.StepOutcome.EXECUTION_CAPACITY_EXCEEDED
    reserving = stage is Stage.RESERVE
    return je.StepOutcome.EXECUTION_CONTRACT_FAILURE if reserving else je.StepOutcome.FATAL_EXECUTION_FAILURE


SURVIVED = [
    (stage, kind)
    for stage in Stage
    for kind in ("retryable", "memory", "unknown")
    if outcome(stage, kind) not in (None, je.StepOutcome.EXECUTION_CONTRACT_FAILURE)
    and stage is not Stage.PUBLISH
]
"""Stages and kinds of errors that an engine that isolates goes on after."""


@dataclasses.dataclass
class Story:
    """What a caller saw of an engine.

    Attributes:
        events: Of requests, as (request, turn, flags, token, reason, usage).
        reports: Of the engine as a whole, as (flags, code).
        raised: Errors that `run` raised while it planned.
        tokens: Each request's sequence at the end of its turn; it is closed then.
        stops: How often the engine stopped and another went on from the state before.
        lost: Whether it stopped after the device write had begun.
    """

    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    reports: list[tuple[Flags, Code]] = dataclasses.field(default_factory=list)
    raised: list[Exception] = dataclasses.field(default_factory=list)
    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    stops: int = 0
    lost: bool = False


def play(
    model: je.Model,
    config: je.EngineConfig,
    prompts: Sequence[Sequence[int]],
    faults: Sequence[tuple[Stage, str, int]] = (),
    *,
    limit: int,
    options: je.RequestOptions | None = None,
) -> Story:
    """Runs one turn of each prompt to its end, whatever happens.

    A step is tried again after every failure. Where the engine stops, the state from before goes to a fresh engine,
    unless the device write has begun.

    Args:
        model: What to run.
        config: The engines' config.
        prompts: A request each.
        faults: Stage, kind and how often the stage is passed unharmed first; all have to fire.
        limit: Most generated tokens of a turn.
        options: Of every request.
    """
    story, engine, handles = Story(), je.Engine(model, config), {}
    for prompt in prompts:
        request = engine.create_request(options)
        request.begin_turn(prompt, je.TurnOptions(limit))
        handles[request.id] = request
    with contextlib.ExitStack() as stack:
        armed = [
            stack.enter_context(je.inject_fault(stage, KINDS[kind](), skip=skip))
            for stage, kind, skip in faults
        ]
        while engine.has_pending_requests():
            kept = engine.state
            try:
                events = engine.run()
            except Exception as error:
                if not any(error is fault.error and fault.stage is Stage.PLAN for fault in armed):
                    raise
                story.raised.append(error)
                continue
            if engine.state.control.failure is not None and not kept.store.lease.spent:
                story.stops += 1
                engine = je.Engine(model, config)
                engine.detach()
                handles = engine.attach(kept)
                continue
            je.check_invariants(engine.state)
            for event in events:
                if event.request is None:
                    story.reports.append((event.flags, event.error_code))
                    continue
                story.events.append(
                    (
                        event.request.id,
                        event.turn_id,
                        event.flags,
                        event.token,
                        event.finish_reason,
                        event.usage,
                    )
                )
                if Flags.TURN_FINISHED in event.flags:
                    story.tokens[event.request.id] = event.request.tokens.tolist()
                    event.request.close()
        story.lost = engine.state.control.failure is not None
        assert story.lost or all(fault.fired for fault in armed)
    return story


Breaks = Callable[[Mapping[int, int]], Exception | None]


@dataclasses.dataclass
class BreakingPrograms:
    """Programs that ask `breaks` for an error before they choose tokens.

    Attributes:
        real: The programs that do the work.
        breaks: Given the batch as request ids with the length that each has after the step, returns what to raise. The
            ids are the requests' seeds, so they have to be left to the engine.
    """

    real: Programs
    breaks: Breaks

    def choose(self, logits: Any, settings: SamplingRows, *edits: Any, **static: Any) -> Any:
        rows = zip(settings.seed.tolist(), settings.position.tolist(), strict=True)
        error = self.breaks({seed: position for seed, position in rows if seed})
        if error is not None:
            raise error
        return self.real.choose(logits, settings, *edits, **static)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def breaking(model: je.Model, breaks: Breaks) -> je.Model:
    """The model with programs that raise what `breaks` returns."""
    return dataclasses.replace(model, programs=BreakingPrograms(model.programs, breaks))


def raising_for(*ids: int, since: int = 0) -> Breaks:
    """Raises for a batch that holds all of `ids`, once each of them is at least `since` tokens long."""

    def breaks(batch: Mapping[int, int]) -> Exception | None:
        hit = all(batch.get(request_id, -1) >= since for request_id in ids)
        return RuntimeError(f"poison {ids}") if hit else None

    return breaks
