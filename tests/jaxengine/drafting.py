"""Turns with drafts beside the same turns alone and without any: what they say must be equal in everything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

import jaxengine as je
from jaxengine.drafts import with_drafts
from jaxengine.requests import has_pending_work
from jaxengine.state import row_of
from jaxengine.toy import toy_model
from tests.jaxengine.harness import SMALL, column

EOS = (24, 25)  # y and z
MODELS = {
    "plain": toy_model(eos=EOS),
    "hybrid": toy_model(eos=EOS, hybrid=True),
    "window": toy_model(eos=EOS, window=3),
    "text": toy_model(eos=EOS, text=True),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Two turns of one request, the second one of one token."""

    model: str
    prompt: tuple[int, ...]
    sampling: je.SamplingParams = je.SamplingParams(temperature=0.0)  # noqa: RUF009 - frozen
    grammar: je.Grammar | None = None
    limit: int = 9
    session: int = 40
    second: int = 3

    @property
    def options(self) -> je.RequestOptions:
        return je.RequestOptions(self.session, self.sampling, self.grammar)


Seen = tuple[object, ...]


def seen(event: je.EventRecord) -> Seen:
    """All that an event says, but whose it is."""
    return dataclasses.astuple(dataclasses.replace(event, request_id=1))


@functools.cache
def alone(asked: Asked) -> tuple[tuple[tuple[Seen, ...], ...], tuple[int, ...]]:
    """What the request says by itself without drafts: the events of each of its turns, and its sequence."""
    player = Player(MODELS[asked.model], SMALL)
    request_id = player.create(asked)
    while request_id in player.left:
        player.step()
    return tuple(map(tuple, player.said[request_id])), tuple(player.tokens(request_id))


def require_optional(state: je.EngineState) -> je.StepPlan:
    """M4: fails unless drafts only use what the step without them leaves over; returns the plan."""
    plan, control = je.plan_step(state), state.control
    for row in np.flatnonzero(control.requests.num_drafts):
        control = with_drafts(control, int(row), ())
    bare = je.plan_step(state.replace(control=control))  # type: ignore[attr-defined]
    for name in ("index", "past", "is_prefill", "is_new", "places", "unserviceable", "evicted"):
        assert np.array_equal(getattr(plan, name), getattr(bare, name)), name
    assert (plan.outcome, plan.deferred) == (bare.outcome, bare.deferred)
    # Prefills grow up to what drafts leave of the budget.
    own, prefill = plan.num_tokens - plan.num_drafts, plan.is_prefill
    assert np.array_equal(own[~prefill], bare.num_tokens[~prefill])
    assert np.array_equal(plan.samples[~prefill], bare.samples[~prefill])
    assert (own >= 1).all()
    assert (own <= bare.num_tokens).all()
    assert own.sum() + plan.num_drafts.sum() >= bare.total_tokens
    assert (plan.num_drafts[plan.is_prefill] == 0).all()
    assert (plan.num_reserved >= bare.num_reserved).all()
    assert plan.total_tokens <= control.config.max_scheduled_tokens
    assert (plan.num_tokens <= (control.config.chunk_size or plan.num_tokens)).all()
    short = plan.num_drafts < np.where(plan.is_prefill, 0, state.control.requests.num_drafts[plan.index])
    if short.any() and plan.total_tokens < control.config.max_scheduled_tokens:
        # Then blocks are short, and the row's last one is full.
        ends = (plan.past + plan.num_tokens)[short & (plan.num_tokens < (control.config.chunk_size or 10**6))]
        assert (ends % control.config.block_size == 0).all()
    return plan


class Player:
    """Requests of two turns, stepped together."""

    def __init__(self, model: je.Model, config: je.EngineConfig) -> None:
        self.model = model
        self.state = je.init_state(model, config)
        self.said: dict[int, list[list[Seen]]] = {}
        self.asked: dict[int, Asked] = {}
        self.left: dict[int, int] = {}

    def create(self, asked: Asked, turns: int = 2) -> int:
        self.state, request_id = je.create_request(self.state, asked.options)
        self.asked[request_id], self.said[request_id], self.left[request_id] = asked, [], turns
        self._begin(request_id, asked.prompt)
        return request_id

    def _begin(self, request_id: int, tokens: Sequence[int]) -> None:
        self.said[request_id].append([])
        options = je.TurnOptions(self.asked[request_id].limit)
        self.state, _ = je.begin_turn(self.state, request_id, tokens, options)

    def tokens(self, request_id: int) -> list[int]:
        row = row_of(self.state.control, request_id)
        length = int(self.state.control.requests.length[row])
        return [int(token) for token in self.state.control.tokens.read(row, 0, length)]

    def step(self) -> None:
        """Runs one step; whose turn is over begins the next one, or is closed where there is none."""
        require_optional(self.state)
        self.state, _ = je.step(self.model, self.state)
        je.check_invariants(self.state)
        self.state, events = je.drain(self.state, 1000)
        for event in events:
            self.said[event.request_id][-1].append(seen(event))
        for event in events:
            if je.EngineEventFlags.TURN_FINISHED in event.flags:
                self._go_on(event.request_id)

    def _go_on(self, request_id: int) -> None:
        self.left[request_id] -= 1
        asked = self.asked[request_id]
        room = asked.session - column(self.state, request_id, "length") > 1
        if self.left[request_id] and room:
            self._begin(request_id, [asked.second])
        else:
            del self.left[request_id]

    def ready(self) -> list[int]:
        """Who may be proposed for."""
        return [
            request_id
            for request_id in self.left
            if column(self.state, request_id, "processed") >= column(self.state, request_id, "input_end")
        ]

    def most(self, request_id: int) -> int:
        """The longest proposal that is taken."""
        asked, state = self.asked[request_id], self.state
        left = asked.session - column(state, request_id, "length")
        if asked.limit:
            left = min(left, asked.limit - column(state, request_id, "generated"))
        return max(min(left - 1, je.max_draft_tokens_per_proposal(state)), 0)

    def upcoming(self, request_id: int) -> list[int]:
        """What this turn goes on to say, an EOS in its place and something behind it."""
        turns, _ = alone(self.asked[request_id])
        done = self.said[request_id]
        rest = turns[len(done) - 1][len(done[-1]) :]
        return [EOS[0] if event[3] == -1 else int(event[3]) for event in rest] + [1, 2, 3]  # type: ignore[call-overload]

    def propose(self, request_id: int, drafts: Sequence[int]) -> None:
        self.state = je.set_draft_tokens(self.state, request_id, drafts)

    def run_out(self) -> None:
        while has_pending_work(self.state):
            self.step()
