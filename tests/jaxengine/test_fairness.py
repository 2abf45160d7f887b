"""Nobody waits longer than the fairness bound says, whatever the policy and the load (C9; C1, C2, C4, C8 too).

Loads run through the real planner over a device that computes nothing; `benchmarks.waits` counts who waited how long,
and says what "ahead" and "crowded" mean. Most tests go through `check`, which states what is promised.
"""

import dataclasses
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from benchmarks.fairness import POLICIES, hostile, prefill_first, shortest_first
from benchmarks.waits import Session, Simulation, Turn, random_sessions, simulate
from jaxengine import scheduling
from jaxengine.policies import decode_first
from jaxengine.toy import continuation, toy_model
from tests.jaxengine.harness import SMALL

MOST_STEPS = 20_000


def check(config, sessions):
    """Runs a load and asserts the whole of C9; returns what came of it."""
    outcome = simulate(config, sessions, MOST_STEPS)
    bound, places = config.fairness_bound, config.max_batch_size
    rows = min(places, config.max_scheduled_tokens)
    assert outcome.overtaken == 0
    if places <= rows * bound:
        assert max(wait.runnable for wait in outcome.waits) <= bound
    if config.preemption == "recompute":
        assert outcome.forced == 0
        # Where rows are scarce too, those that get their blocks at once are served one full step after the other.
        extra = 0 if rows == places else math.ceil(places / rows)
        for wait in outcome.waits:
            if places <= rows * bound:
                assert wait.covered <= bound + extra
            assert wait.crowded <= bound + extra + wait.ahead * (bound + outcome.longest_prefill)
    return outcome


@st.composite
def loads(draw):
    """A configuration and a load of which every session fits into the empty pool; a third of it at most a turn."""
    block_size = draw(st.sampled_from([1, 4]))
    num_blocks = draw(st.sampled_from([8, 16, 40]))
    config = je.EngineConfig(
        max_batch_size=draw(st.sampled_from([2, 4, 12])),
        max_scheduled_tokens=draw(st.sampled_from([64, 16, 3, 1])),
        num_blocks=num_blocks,
        block_size=block_size,
        chunk_size=draw(st.sampled_from([None, 5, 1])),
        fairness_bound=draw(st.sampled_from([2, 3, 4, 8, 16])),
        policy=draw(st.sampled_from(list(POLICIES.values()))),
        preemption=draw(st.sampled_from(["recompute", "recompute", "none"])),
    )
    most = max(num_blocks * block_size // 6, 1)
    size = st.one_of(st.integers(1, most), st.integers(1, 3))
    turns = st.lists(st.builds(Turn, size, size, st.integers(0, 9)), min_size=1, max_size=3)
    sessions, arrival = [], 0
    for _ in range(draw(st.integers(3, 12))):
        arrival += draw(st.sampled_from([0, 0, 1, 5]))
        sessions.append(Session(arrival, tuple(draw(turns))))
    return config, sessions


@given(loads())
@settings(max_examples=100)
def test_C9_nobody_waits_beyond_the_bound_whatever_the_policy_and_the_load(load):
    check(*load)


@given(loads())
@settings(max_examples=400)
@pytest.mark.slow
@pytest.mark.thorough
def test_C9_nobody_waits_beyond_the_bound_over_many_loads(load):
    check(*load)


PINNED = {
    "blocks come just in time for a row": (116, 2.0, 8, 4, 4, 1, 1, 8, shortest_first, "none"),
    "whoever runs at the last moment is no victim": (
        119,
        0.3,
        40,
        4,
        12,
        16,
        5,
        2,
        prefill_first,
        "recompute",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_C9_loads_that_found_a_mistake(name):
    seed, arrivals, num_blocks, block_size, places, tokens, chunk, bound, policy, preemption = PINNED[name]
    config = je.EngineConfig(
        places,
        tokens,
        num_blocks,
        block_size,
        chunk,
        fairness_bound=bound,
        policy=policy,
        preemption=preemption,
    )
    check(config, random_sessions(seed, 14, num_blocks * block_size, arrivals))


@pytest.mark.parametrize("preemption", ["recompute", "none"])
def test_C9_a_newcomer_leaves_blocks_to_a_longer_wait_that_comes_to_the_bound(preemption):
    """Ten blocks come free when the third has waited a step; the second takes three, and the fourth wants four."""

    def third_last(candidates):
        return np.argsort(candidates.request_ids == 3, kind="stable")

    config = je.EngineConfig(
        8, 64, num_blocks=11, block_size=4, fairness_bound=2, policy=third_last, preemption=preemption
    )
    sessions = [
        Session(0, (Turn(24, 2),)),
        Session(0, (Turn(1, 1), Turn(11, 3, pause=1))),
        Session(1, (Turn(24, 3),)),
        Session(2, (Turn(16, 3),)),
    ]
    simulation = Simulation(config, sessions)
    for _ in range(2):
        simulation._arrive()
        simulation._step()
        simulation.clock += 1
    simulation._arrive()
    plan = je.plan_step(simulation.state)
    assert (plan.request_ids.tolist(), plan.num_reserved.tolist()) == ([2, 3], [3, 6])


@pytest.mark.parametrize("policy", POLICIES.values())
def test_C9_decodes_without_end_starve_no_prefill(policy):
    """Two rows a step for eight residents, seven of which decode all the time."""
    config = je.EngineConfig(8, 2, num_blocks=400, block_size=4, fairness_bound=6, policy=policy)
    decoders = [Session(0, (Turn(3, 100),)) for _ in range(7)]
    outcome = check(config, [*decoders, Session(40, (Turn(9, 2),))])
    if policy is decode_first:
        assert outcome.waits[-1].runnable == 6


def small_ones(count):
    """A newcomer a step; five of them are there at any time, of two blocks each at their end."""
    return [Session(step, (Turn(3, 5),)) for step in range(count)]


@pytest.mark.parametrize("policy", POLICIES.values())
def test_C9_small_newcomers_starve_no_big_one(policy):
    """The big one needs 12 of 16 blocks, of which the small ones leave eight free at most."""
    config = je.EngineConfig(16, 64, num_blocks=16, block_size=4, fairness_bound=20, policy=policy)
    outcome = check(config, [*small_ones(100), Session(30, (Turn(45, 3),))])
    assert outcome.preemptions
    assert 0 < outcome.waits[-1].covered <= 20


@pytest.mark.parametrize("policy", POLICIES.values())
def test_C9_without_preemption_the_pool_drains_for_a_big_one(policy):
    config = je.EngineConfig(
        16, 64, num_blocks=16, block_size=4, fairness_bound=20, policy=policy, preemption="none"
    )
    outcome = check(config, [*small_ones(100), Session(30, (Turn(45, 3),))])
    assert (outcome.preemptions, outcome.forced) == (0, 0)
    big = outcome.waits[-1]
    # Whoever is in when the claim begins needs at most five more steps.
    assert 20 <= max(big.covered, big.crowded) <= 20 + 5


def whole_pool(count):
    """Requests that all come at once, and of which no two fit."""
    return [Session(0, (Turn(33, 25),)) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_C9_requests_that_each_need_the_whole_pool_take_turns_of_a_bound(count):
    """Infeasible from three on: the last one waits for the stays of all but one of those ahead, and no longer."""
    config = je.EngineConfig(8, 64, num_blocks=16, block_size=4, fairness_bound=6)
    outcome = check(config, whole_pool(count))
    longest = max(max(wait.covered, wait.crowded) for wait in outcome.waits)
    assert longest == (count - 1) * 6
    # Twenty-five tokens each, seven at most in a stay.
    assert outcome.preemptions <= 4 * count


def test_C9_the_wait_of_two_that_do_not_fit_together_grows_with_their_prefill():
    config = je.EngineConfig(8, 64, num_blocks=16, block_size=4, chunk_size=4, fairness_bound=6)
    outcome = check(config, whole_pool(2))
    assert outcome.longest_prefill >= 9
    assert max(wait.crowded for wait in outcome.waits) > 6


def recorded(policy, calls):
    def record(candidates):
        order = policy(candidates)
        calls.append((candidates, order))
        return order

    return record


@pytest.mark.parametrize("policy", POLICIES.values())
def test_C1_the_policy_alone_decides_within_the_bound(policy):
    """One row in a hundred steps is all that the bound asks for, so none of the first ones is its doing."""
    calls = []
    config = je.EngineConfig(
        6, 4, num_blocks=20, block_size=4, fairness_bound=100, policy=recorded(policy, calls)
    )
    simulation = Simulation(config, [Session(step, (Turn(5, 9), Turn(2, 3))) for step in range(6)])
    reordered = 0
    for _ in range(40):
        simulation._arrive()
        calls.clear()
        plan = je.plan_step(simulation.state)
        if calls:
            candidates, order = calls[0]
            ranked = candidates.request_ids[order].tolist()
            rows = plan.request_ids.tolist()
            assert rows == [i for i in ranked if i in rows]
            reordered += ranked != candidates.request_ids.tolist()
        simulation._step()
        simulation.clock += 1
    assert reordered


@pytest.mark.parametrize("policy", POLICIES.values())
def test_C4_a_request_that_does_not_fit_hides_no_smaller_one_under_any_policy(policy):
    config = je.EngineConfig(8, 64, num_blocks=16, block_size=4, policy=policy)
    simulation = Simulation(
        config, [Session(0, (Turn(40, 9),)), Session(1, (Turn(50, 3),)), Session(2, (Turn(8, 3),))]
    )
    for _ in range(4):
        simulation._arrive()
        simulation._step()
        simulation.clock += 1
    assert [seen.admitted for seen in simulation.seen.values()] == [1, None, 3]


@given(loads(), st.integers(1, 30))
@settings(max_examples=20)
def test_C2_C8_the_same_state_gives_the_same_plan_within_both_limits_under_any_policy(load, steps):
    config, sessions = load
    simulation = Simulation(config, sessions)
    for _ in range(steps):
        simulation._arrive()
        first, second = je.plan_step(simulation.state), je.plan_step(simulation.state)
        for field in dataclasses.fields(first):
            assert np.array_equal(getattr(first, field.name), getattr(second, field.name))
        assert len(first.index) <= min(config.max_batch_size, config.max_scheduled_tokens)
        assert first.total_tokens <= config.max_scheduled_tokens
        simulation._step()
        je.check_invariants(simulation.state)
        simulation.clock += 1


WRONG = {
    "nothing": lambda n: None,
    "a number": lambda n: 0,
    "too few": lambda n: np.arange(n)[1:],
    "too many": lambda n: np.arange(n + 1),
    "one twice": lambda n: np.zeros(n, int),
    "one outside": lambda n: np.arange(n) + 1,
    "one negative": lambda n: np.arange(n) - 1,
    "a column": lambda n: np.arange(n)[:, None],
    "floats": lambda n: np.arange(n, dtype=float),
    "a mask": lambda n: np.arange(n) > 0,
    "ragged": lambda n: [[0], [1, 0]],
    "words": lambda n: ["0", "1"][:n],
}


@pytest.mark.parametrize("kind", WRONG)
def test_C1_a_policy_that_returns_no_order_is_refused_by_name_and_the_engine_stays_well(kind):
    broken = True

    def sometimes(candidates):
        return WRONG[kind](len(candidates.request_ids)) if broken else decode_first(candidates)

    with je.Engine(toy_model(), dataclasses.replace(SMALL, policy=sometimes)) as engine:
        requests = [engine.create_request() for _ in range(2)]
        for request in requests:
            request.begin_turn([3, 1], je.TurnOptions(4))
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"(?s)EngineConfig\.policy .*sometimes.* return each index from 0 to 1 once"
            ):
                engine.run()
        broken = False
        while engine.has_pending_requests():
            engine.run()
        for request in requests:
            assert request.tokens.tolist() == [3, 1, *continuation([3, 1], 4)]


def test_C1_a_policy_that_raises_leaves_the_engine_well():
    def fails(candidates):
        raise KeyError("no such tenant")

    with je.Engine(toy_model(), dataclasses.replace(SMALL, policy=fails)) as engine:
        request = engine.create_request()
        request.begin_turn([1])
        before = engine.state
        with pytest.raises(KeyError, match="no such tenant"):
            engine.run()
        assert engine.state is before


def test_C9_lists_are_orders_too():
    config = dataclasses.replace(SMALL, policy=lambda candidates: list(range(len(candidates.request_ids))))
    check(config, [Session(0, (Turn(3, 4),)) for _ in range(5)])


class TestTheWaitsCanTell:
    """The simulation is a judge that must be able to say no."""

    LOAD = (
        je.EngineConfig(16, 64, num_blocks=16, block_size=4, fairness_bound=20),
        [*small_ones(100), Session(30, (Turn(45, 3),))],
    )

    def test_C9_nobody_gives_way(self, monkeypatch):
        monkeypatch.setattr(scheduling, "_for_the_due", lambda *_: np.zeros(0, np.int64))
        with pytest.raises(AssertionError):
            check(*self.LOAD)

    def test_C9_nothing_is_claimed(self, monkeypatch):
        real = scheduling._demand

        def without_claims(control, rows):
            demand = real(control, rows)
            return dataclasses.replace(demand, claimed=np.zeros_like(demand.claimed))

        monkeypatch.setattr(scheduling, "_demand", without_claims)
        config, sessions = self.LOAD
        with pytest.raises(AssertionError):
            check(dataclasses.replace(config, preemption="none"), sessions)

    def test_C9_deadlines_are_not_looked_at(self, monkeypatch):
        monkeypatch.setattr(
            scheduling, "_by_deadline", lambda demand, rows, bound: np.arange(len(demand.rows))
        )
        config = je.EngineConfig(8, 2, num_blocks=400, block_size=4, fairness_bound=6, policy=hostile)
        with pytest.raises(AssertionError):
            check(config, [Session(0, (Turn(3, 30),)) for _ in range(8)])
