"""Serves prompts through the functional core and keeps the logits behind every sampled token, for comparing bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

import jaxengine as je


@dataclasses.dataclass(frozen=True)
class Served:
    """What one run gave.

    Attributes:
        logits: float32[vocab] by (nth prompt, length of the sequence that it follows).
        tokens: Each prompt's generated tokens.
        steps: How many steps were committed.
        widest: Most rows of a step.
    """

    logits: dict[tuple[int, int], np.ndarray]
    tokens: list[list[int]]
    steps: int
    widest: int


def serve(
    model: je.Model,
    config: je.EngineConfig,
    prompts: Sequence[np.ndarray],
    *,
    most: int,
    arrivals: Sequence[int] | None = None,
    sampling: Sequence[je.SamplingParams] | None = None,
    dropped: frozenset[int] = frozenset(),
    sessions: Sequence[int] | None = None,
) -> Served:
    """Runs all prompts to the end of one turn of at most `most` tokens.

    Prompt i arrives at step `arrivals[i]`, its request limited to `sessions[i]` tokens; steps in `dropped` are executed
    twice, the first time in vain. A request is closed when it finishes, and invariants are checked after every step.
    """
    state = je.init_state(model, config)
    waiting = dict(enumerate([0] * len(prompts) if arrivals is None else arrivals))
    nth: dict[int, int] = {}
    logits: dict[tuple[int, int], np.ndarray] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    clock = steps = widest = 0
    while True:
        for i in [i for i, arrival in waiting.items() if arrival <= clock]:
            chosen = je.SamplingParams(temperature=0.0) if sampling is None else sampling[i]
            limit = None if sessions is None else sessions[i]
            options = je.RequestOptions(sampling=chosen, max_session_tokens=limit)
            state, request_id = je.create_request(state, options)
            state, _ = je.begin_turn(state, request_id, prompts[i], je.TurnOptions(max_generated_tokens=most))
            nth[request_id] = i
            del waiting[i]
        plan = je.plan_step(state)
        clock += 1
        if plan.outcome is not je.StepOutcome.COMMITTED:
            assert plan.outcome is je.StepOutcome.NO_WORK, f"{plan.outcome} in {config}"
            if not waiting:
                return Served(logits, tokens, steps, widest)
            continue
        if steps in dropped:
            je.execute(model, state, plan)
        transaction = je.execute(model, state, plan)
        for row, past, values in zip(
            plan.rows, plan.past.tolist(), np.array(transaction.logits), strict=True
        ):
            if row.samples:
                logits[nth[row.request_id], past + row.num_tokens] = values
        state, events = je.commit(state, transaction)
        steps += 1
        widest = max(widest, len(plan.rows))
        je.check_invariants(state)
        state, _ = je.drain(state, len(events))
        for event in events:
            if event.flags & je.EngineEventFlags.TOKEN:
                tokens[nth[event.request_id]].append(event.token)
            if event.flags & je.EngineEventFlags.TURN_FINISHED:
                state = je.close_request(state, event.request_id)
        je.check_invariants(state)


def differences(got: Served, alone: Served) -> list[str]:
    """Each place where two runs' logits are not the same bits, in words."""
    found = [f"logits of {key} exist in one run only" for key in got.logits.keys() ^ alone.logits.keys()]
    for key in sorted(got.logits.keys() & alone.logits.keys()):
        one, other = got.logits[key], alone.logits[key]
        if not np.array_equal(one, other):
            found.append(
                f"prompt {key[0]} after {key[1]} tokens: {np.abs(one - other).max():.2e} in {(one != other).sum()} ids"
            )
    return found
