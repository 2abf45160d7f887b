"""Random loads through the engine's own planner and commits, over a device that computes nothing; who waits how long.

Sessions arrive, take their turns and are closed at their end. A request that is passed over in a step that serves
others waits in one of these ways:

- it could run: a place and the blocks for its next tokens are at hand, and nobody with an older claim needs those;
- it waits for blocks: it has a place, and those that run hold the blocks, or somebody with an older claim needs them;
- it waits for a place, or for a finished session to be closed.

The bound speaks of the first two. A request is crowded if it does not fit into the pool beside those ahead of it: those
that have waited longer, and those that had, but were let in after its wait began or had no token by then. It then waits
for their stays.

Nothing here is taken from the scheduler but its plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxengine as je
from jaxengine.programs import ForwardResult
from jaxengine.sampling import Choice
from jaxengine.state import PREEMPTIONS, STEPS, row_of
from onnx_import import FolderConfig

LONGEST = 1 << 20
LIVE = (je.RequestStatus.QUEUED, je.RequestStatus.ACTIVE)


class NullDecoder:
    """A decoder without layers; nothing traces it."""

    layers = ()
    fixed = ()
    vocab_size = 2
    params: Mapping[str, Any] = {}
    identity = "null"


class NullPrograms:
    """A device that computes nothing: every token is 0, and the store stays as it is."""

    def forward(self, params, pages, block_table, fixed, batch, **static):
        """Returns logits of 0 for each row of the bucket."""
        return ForwardResult((), (), np.zeros((len(batch.logits_rows), 2)))

    def choose(self, logits, *settings, **static):
        """Chooses token 0 in each row."""
        return Choice(np.zeros(len(logits), np.int32), np.ones(len(logits), bool), None)

    def publish(self, pages, block_table, fixed, staged, states, to, **static):
        """Returns the store."""
        return pages, block_table, fixed

    publish_copy = publish


def null_model() -> je.Model:
    """A model whose steps cost only what planning and bookkeeping cost."""
    config = FolderConfig("null", NullDecoder.vocab_size, LONGEST, LONGEST, (), None, None, {}, ())
    return je.Model(NullDecoder(), config, Path("null"), NullPrograms())  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Tokens in, tokens out, and steps between the end of the turn before and this one."""

    prompt: int
    answer: int
    pause: int = 0


@dataclasses.dataclass(frozen=True)
class Session:
    """A request that begins at a step, takes its turns and is closed."""

    arrival: int
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """All its tokens, in and out."""
        return sum(turn.prompt + turn.answer for turn in self.turns)


@dataclasses.dataclass
class Wait:
    """How long one request waited.

    Attributes:
        runnable: Longest run of steps in which it could have run.
        covered: Longest run of steps in which it could have run or waited for blocks, where it fitted beside those
            ahead of it.
        crowded: The same where it did not fit.
        ahead: How many were ahead of it in that run, at most.
    """

    runnable: int = 0
    covered: int = 0
    crowded: int = 0
    ahead: int = 0


@dataclasses.dataclass
class Outcome:
    """What came of a load.

    Attributes:
        waits: One a session.
        steps: Steps that served somebody.
        tokens: Tokens that were run, those run again included.
        replayed: Tokens that had been run and were given up.
        preemptions: How often.
        longest_prefill: Most steps between a request's getting its place and its first token.
        overtaken: How often somebody was let in past one whose wait for blocks had reached the bound.
        forced: How often the caller had to close a session because nothing could run.
    """

    waits: list[Wait]
    steps: int = 0
    tokens: int = 0
    replayed: int = 0
    preemptions: int = 0
    longest_prefill: int = 1
    overtaken: int = 0
    forced: int = 0


@dataclasses.dataclass
class Seen:
    """What the simulation remembers of a live request; times are counts of steps that served somebody.

    Attributes:
        session: Which it is.
        turn: Which of its turns is next.
        resume: When that one begins, by the clock; None while a turn runs.
        since: When it was last served, or queued.
        submitted: Rank of its newest turn.
        place_since: When its wait for the place that it has began, and the rank of its turn then.
        admitted: When it got that place; None without one.
        first_token: When it had its first token there.
        runnable, run: Its present runs of waiting; `crowded` and `ahead` belong to the second.
    """

    session: int
    turn: int = 0
    resume: int | None = None
    since: int = 0
    submitted: int = 0
    place_since: tuple[int, int] = (0, 0)
    admitted: int | None = None
    first_token: int | None = None
    runnable: int = 0
    run: int = 0
    crowded: bool = False
    ahead: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Sorts those that wait, the longest first."""
        return self.since, self.submitted


class Simulation:
    """One load on its way through an engine."""

    def __init__(self, config: je.EngineConfig, sessions: Sequence[Session]) -> None:
        """Makes an engine for a load; a session that could not run in an empty pool is no part of one."""
        self.config = config
        self.model = null_model()
        self.state = je.init_state(self.model, config)
        self.sessions = sessions
        self.outcome = Outcome([Wait() for _ in sessions])
        self.seen: dict[int, Seen] = {}
        self.clock = 0
        self.submissions = 0
        self._coming = sorted(range(len(sessions)), key=lambda i: sessions[i].arrival)

    def run(self, most_steps: int = 1_000_000) -> Outcome:
        """Runs to the end of every session; raises RuntimeError if that takes more than `most_steps`."""
        while self._coming or self.seen:
            self._arrive()
            self._step()
            self.clock += 1
            if self.outcome.steps > most_steps:
                raise RuntimeError(f"the load has not ended after {most_steps} steps")
        counts = self.state.control.counters
        self.outcome.preemptions = int(counts[PREEMPTIONS])
        return self.outcome

    def _arrive(self) -> None:
        while self._coming and self.sessions[self._coming[0]].arrival <= self.clock:
            index = self._coming.pop(0)
            self.state, request_id = je.create_request(self.state)
            self.seen[request_id] = Seen(index, resume=self.clock)
        for request_id, seen in self.seen.items():
            if seen.resume is not None and seen.resume <= self.clock:
                self._begin(request_id, seen)

    def _begin(self, request_id: int, seen: Seen) -> None:
        turn = self.sessions[seen.session].turns[seen.turn]
        self.state, _ = je.begin_turn(self.state, request_id, [0] * turn.prompt, je.TurnOptions(turn.answer))
        self.submissions += 1
        seen.turn, seen.resume = seen.turn + 1, None
        seen.since, seen.submitted = self._now, self.submissions
        seen.runnable = seen.run = 0

    @property
    def _now(self) -> int:
        return int(self.state.control.counters[STEPS])

    def _step(self) -> None:
        plan = je.plan_step(self.state)
        if plan.outcome in (je.StepOutcome.NO_WORK, je.StepOutcome.CAPACITY_DEFERRED):
            waits_for_the_caller = not self._coming and all(
                seen.resume is None for seen in self.seen.values()
            )
            if plan.outcome == je.StepOutcome.CAPACITY_DEFERRED and waits_for_the_caller:
                self._close_largest()
            return
        rows = {row.request_id: row for row in plan.rows}
        if rows:
            self._count_waits(rows.keys())
        before = self.state.control
        self.outcome.replayed += sum(
            int(before.requests.processed[row_of(before, i)]) for i in plan.evicted.tolist()
        )
        self.outcome.tokens += plan.total_tokens
        self.state, events = je.commit(self.state, je.execute(self.model, self.state, plan))
        self.state, _ = je.drain(self.state, len(events))
        self.outcome.steps = self._now
        for request_id, row in rows.items():
            self._note_served(self.seen[request_id], row)
        for request_id in plan.evicted.tolist():
            self.seen[request_id].admitted = self.seen[request_id].first_token = None
        for event in events:
            if event.flags & je.EngineEventFlags.TURN_FINISHED:
                self._end_turn(event.request_id)

    def _note_served(self, seen: Seen, row: je.PlanRow) -> None:
        if row.is_new:
            seen.place_since, seen.admitted = seen.age, self._now
        if row.samples and seen.first_token is None:
            seen.first_token = self._now
            assert seen.admitted is not None
            taken = self._now - seen.admitted + 1
            self.outcome.longest_prefill = max(self.outcome.longest_prefill, taken)
        seen.since = self._now
        seen.runnable = seen.run = 0

    def _end_turn(self, request_id: int) -> None:
        seen = self.seen[request_id]
        turns = self.sessions[seen.session].turns
        if seen.turn < len(turns):
            seen.resume = self.clock + 1 + turns[seen.turn].pause
        else:
            self._close(request_id)

    def _close(self, request_id: int) -> None:
        self.state = je.close_request(self.state, request_id)
        del self.seen[request_id]

    def _close_largest(self) -> None:
        held = self.state.control.blocks_held
        self._close(int(self.state.control.requests.id[int(np.argmax(held))]))
        self.outcome.forced += 1

    def _count_waits(self, served: Collection[int]) -> None:
        """Adds a step that serves `served` to the waits of all others."""
        control, bound = self.state.control, self.config.fairness_bound
        free_places = self.config.max_batch_size - int((control.requests.place >= 0).sum())
        free_blocks, available = len(control.free_blocks), control.num_blocks
        needs: dict[int, int] = {}
        lacks: dict[int, int] = {}
        is_new: dict[int, bool] = {}
        for row, request_id in enumerate(control.requests.id.tolist()):
            held = int(control.blocks_held[row])
            if control.requests.status[row] in LIVE:
                needs[request_id] = math.ceil(control.requests.length[row] / self.config.block_size)
                lacks[request_id] = needs[request_id] - held
                is_new[request_id] = bool(control.requests.place[row] < 0)
            else:
                available -= held
        # From the longest waiting to the shortest: how many newcomers so far, what those about to be late lack, and
        # whether somebody late was passed over.
        newcomers = claimed = 0
        passed_over = False
        line = sorted(needs, key=lambda i: self.seen[i].age)
        for position, request_id in enumerate(line):
            seen = self.seen[request_id]
            newcomers += is_new[request_id]
            runnable = lacks[request_id] == 0 or lacks[request_id] + claimed <= free_blocks
            has_place = not is_new[request_id] or newcomers <= free_places
            concerned = has_place and needs[request_id] <= available
            if concerned and self._now - seen.since >= bound - 1:
                claimed += lacks[request_id]
            if request_id in served:
                self.outcome.overtaken += passed_over and is_new[request_id]
            elif concerned:
                passed_over |= lacks[request_id] > 0 and self._now - seen.since >= bound
                ahead = [i for i in line[:position] if i not in served or is_new[i]]
                ahead += [i for i in line if i not in ahead and self._keeps(i, seen)]
                crowded = newcomers - is_new[request_id] > free_places
                crowded |= sum(needs[i] for i in (*ahead, request_id)) > available
                self._count_wait(seen, runnable, crowded, len(ahead))
            else:
                seen.runnable = seen.run = 0

    def _count_wait(self, seen: Seen, runnable: bool, crowded: bool, ahead: int) -> None:
        if seen.run == 0:
            seen.crowded, seen.ahead = False, 0
        seen.run += 1
        seen.runnable = seen.runnable + 1 if runnable else 0
        seen.crowded |= crowded
        seen.ahead = max(seen.ahead, ahead)
        wait = self.outcome.waits[seen.session]
        wait.runnable = max(wait.runnable, seen.runnable)
        if seen.crowded:
            wait.crowded, wait.ahead = max(wait.crowded, seen.run), max(wait.ahead, seen.ahead)
        else:
            wait.covered = max(wait.covered, seen.run)

    def _keeps(self, other: int, seen: Seen) -> bool:
        """Whether a resident has an older right to its place, and had no token there when `seen` began to wait."""
        held = self.seen[other]
        if held is seen or held.admitted is None or held.place_since > seen.age:
            return False
        return held.first_token is None or held.first_token > seen.since


def simulate(config: je.EngineConfig, sessions: Sequence[Session], most_steps: int = 1_000_000) -> Outcome:
    """Runs a load to its end."""
    return Simulation(config, sessions).run(most_steps)


def random_sessions(seed: int, count: int, slots: int, arrivals_per_step: float) -> list[Session]:
    """Sessions of very different sizes that arrive independently of each other; none needs more than `slots` tokens."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / arrivals_per_step, count)).astype(int).tolist()
    sessions = []
    for arrival in arrivals:
        turns: list[Turn] = []
        for _ in range(random.geometric(0.6)):
            mean = slots * random.choice([0.03, 0.1, 0.4], p=[0.5, 0.35, 0.15])
            turn = Turn(
                prompt=1 + int(random.exponential(mean)),
                answer=1 + int(random.exponential(mean)),
                pause=int(random.exponential(10)),
            )
            if sum(t.prompt + t.answer for t in (*turns, turn)) <= slots:
                turns.append(turn)
        sessions.append(Session(arrival, tuple(turns) or (Turn(1, 1),)))
    return sessions
