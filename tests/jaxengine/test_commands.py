"""Random commands, against the plain-Python twin, with every invariant checked after each: A1 to A10, A15, B2, B4,
B9, C1 to C8, D1 to D4, E1 and E2.
"""

import copy
import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxengine as je
from jaxengine.toy import LETTERS, toy_model
from tests.jaxengine.harness import assert_same, leaves
from tests.jaxengine.naive import LIVE, NaiveEngine

EOS = (3, 17)
MODEL = toy_model(eos=EOS)
TIGHT = je.EngineConfig(max_batch_size=3, max_scheduled_tokens=7, num_blocks=7, block_size=4)
"""28 slots for three requests that may hold 64 tokens each: every kind of shortage comes up."""

WHICH = st.integers(0, 6)
LIMIT = st.integers(0, 6)
TOKENS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=12)


def without_detail(events):
    return [dataclasses.replace(event, detail="") for event in events]


class Commands(RuleBasedStateMachine):
    """Every rule does the same to the state and to its twin; a refusal must leave the state as it was."""

    @property
    def control(self):
        return self.state.control

    @initialize(
        chunk_size=st.sampled_from([None, 1, 3, 5]),
        budget=st.sampled_from([16, 7, 5, 2, 1]),
        bound=st.sampled_from([64, 4, 2, 1]),
        preemption=st.sampled_from(["recompute", "none"]),
        first=st.lists(st.tuples(TOKENS, LIMIT), min_size=4, max_size=6),
    )
    def start(self, chunk_size, budget, bound, preemption, first):
        config = dataclasses.replace(
            TIGHT,
            chunk_size=chunk_size,
            max_scheduled_tokens=budget,
            fairness_bound=bound,
            preemption=preemption,
        )
        self.state = je.init_state(MODEL, config)
        self.naive = NaiveEngine(config, EOS)
        self.kept = None
        self.must_copy = False
        for tokens, limit in first:
            self.create(0)
            self.begin(self.naive.last_id, tokens, limit)

    def pick(self, which):
        """An id that was given out: the newest few come up most."""
        return max(self.naive.last_id - which, 1)

    @rule(limit=st.sampled_from([0, 9, 20, 2]))
    def create(self, limit):
        self.state, request_id = je.create_request(self.state, je.RequestOptions(max_session_tokens=limit))
        assert request_id == self.naive.create(limit)

    @rule(which=WHICH, tokens=TOKENS, limit=LIMIT)
    def begin_turn(self, which, tokens, limit):
        self.begin(self.pick(which), tokens, limit)

    @rule(tokens=TOKENS, limit=LIMIT)
    def serve(self, tokens, limit):
        """What a server does between steps: drains, breaks deadlocks, lets whoever has finished go on, or go."""
        self.drain(len(self.naive.events))
        if je.plan_step(self.state).outcome == je.StepOutcome.CAPACITY_DEFERRED:
            self.close_request(max(self.naive.requests.values(), key=lambda request: request.blocks).id)
        for request in list(self.naive.requests.values()):
            if request.status not in LIVE:
                if self.naive.may_begin(request.id, len(tokens)):
                    self.begin(request.id, tokens, limit)
                else:
                    self.close_request(request.id)
                    self.create(0)
        for _ in range(4):
            self.one_step()

    def begin(self, request_id, tokens, limit):
        if request_id in self.naive.requests and self.naive.may_begin(request_id, len(tokens)):
            self.state, turn = je.begin_turn(self.state, request_id, tokens, je.TurnOptions(limit))
            assert turn == self.naive.begin(request_id, tokens, limit)
            return
        before = leaves(self.state)
        with pytest.raises((ValueError, je.RequestStateError)):
            je.begin_turn(self.state, request_id, tokens, je.TurnOptions(limit))
        assert_same(before, leaves(self.state))

    @rule(which=WHICH, stale=st.sampled_from([0, 0, 0, 1]))
    def cancel(self, which, stale):
        request = self.naive.requests.get(self.pick(which))
        if request is None or request.turn == 0:
            with pytest.raises(je.RequestStateError):
                je.cancel_turn(self.state, self.pick(which), 1)
            return
        turn = request.turn - stale
        self.state, cancelled = je.cancel_turn(self.state, request.id, turn)
        assert cancelled == self.naive.cancel(request.id, turn)

    @rule(which=WHICH)
    def close(self, which):
        self.close_request(self.pick(which))

    def close_request(self, request_id):
        self.state = je.close_request(self.state, request_id)
        self.naive.close(request_id)
        assert je.requests.status_of(self.state, request_id) == je.RequestStatus.CLOSED

    @rule(count=st.sampled_from([100, 1, 0, 3]))
    def drain(self, count):
        self.state, events = je.drain(self.state, count)
        assert without_detail(events) == list(self.naive.drain(count))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.one_step()

    def one_step(self):
        plan = je.plan_step(self.state)
        self.compare_plan(plan)
        self.naive.step()
        if plan.outcome in (je.StepOutcome.NO_WORK, je.StepOutcome.CAPACITY_DEFERRED):
            return
        transaction = je.execute(MODEL, self.state, plan)
        before = len(self.control.events)
        self.state, events = je.commit(self.state, transaction, donate=not self.must_copy)
        self.must_copy = False
        assert without_detail(events) == self.naive.events[before:]
        rows = [event.request_id for event in events]
        assert len(rows) == len(set(rows))

    @rule()
    @precondition(lambda self: bool(self.naive.candidates()))
    def drop_a_transaction(self):
        plan = je.plan_step(self.state)
        if plan.outcome == je.StepOutcome.CAPACITY_DEFERRED:
            return
        before = leaves(self.state)
        je.execute(MODEL, self.state, plan)
        assert_same(before, leaves(self.state))

    @rule()
    def keep(self):
        self.kept = (self.state, copy.deepcopy(self.naive))
        self.must_copy = True

    @rule()
    @precondition(lambda self: self.kept is not None)
    def go_back(self):
        self.state, self.naive = self.kept[0], copy.deepcopy(self.kept[1])
        self.must_copy = True

    def compare_plan(self, plan):
        expected = self.naive.plan()
        rows, hopeless, deferred = expected.rows, expected.hopeless, expected.deferred
        assert plan.deferred == deferred
        assert sorted(plan.evicted.tolist()) == sorted(request.id for request in expected.evicted)
        assert plan.unserviceable.tolist() == [request.id for request in hopeless]
        assert [(row.request_id, row.num_tokens, len(row.block_ids)) for row in plan.rows] == [
            (row.request.id, row.count, row.new_blocks) for row in rows
        ]
        if rows or expected.evicted:
            assert plan.outcome == je.StepOutcome.COMMITTED
        elif hopeless:
            assert plan.outcome == je.StepOutcome.UNSERVICEABLE_REQUEST
        elif deferred:
            assert plan.outcome == je.StepOutcome.CAPACITY_DEFERRED
        else:
            assert plan.outcome == je.StepOutcome.NO_WORK

    @invariant()
    def agrees_with_its_twin(self):
        je.check_invariants(self.state)
        columns, twins = self.control.requests, list(self.naive.requests.values())
        assert columns.id.tolist() == [twin.id for twin in twins]
        for row, twin in enumerate(twins):
            assert self.control.tokens.read(row, 0, int(columns.length[row])).tolist() == twin.tokens
            assert columns.status[row] == twin.status
            assert columns.processed[row] == twin.processed
            assert columns.turn[row] == twin.turn
            assert (columns.place[row] >= 0) == (twin.rank is not None)
            assert self.control.blocks_held[row] == twin.blocks
        assert len(self.control.free_blocks) == self.naive.free_blocks
        assert without_detail(self.control.events) == self.naive.events
        live = any(twin.status in LIVE for twin in twins)
        assert je.requests.has_pending_work(self.state) == (live or bool(self.naive.events))


Commands.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCommands = Commands.TestCase
