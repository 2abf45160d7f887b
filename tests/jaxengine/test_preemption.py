"""Who gives its blocks back and runs its tokens again ends with the same output; all ends (C11; A8, A10, A15).

Outputs are the toy decoder's, worked out by hand, or those of a pool that is never short; what needs more tokens than
the toy's context runs through the planner alone, over a device that computes nothing.
"""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

import jaxengine as je
from benchmarks.fairness import POLICIES
from benchmarks.waits import Session, Turn, simulate
from jaxengine.requests import has_pending_work, status_of
from jaxengine.toy import LETTERS, continuation, toy_model
from tests.jaxengine.harness import SMALL, begun, column, finish, tokens_of

MODEL = toy_model()
TIGHT = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=7, block_size=4)
ROOMY = dataclasses.replace(TIGHT, num_blocks=64)


def preemptions(state):
    return je.metrics.metrics_of(state).preemptions


def until_preempted(state):
    """Steps until a request has given its blocks back; returns the state and the request's id."""
    while True:
        plan = je.plan_step(state)
        assert plan.outcome == je.StepOutcome.COMMITTED, "nobody had to give way"
        state, events = je.step(MODEL, state)
        state, _ = je.drain(state, len(events))
        if len(plan.evicted):
            return state, int(plan.evicted[0])


def served(state):
    """Steps to the end and closes whoever finishes; returns their tokens, their terminal events and the state."""
    tokens, ends = {}, {}
    while has_pending_work(state):
        before = state
        state, events = je.step(MODEL, state)
        assert state is not before, "every request waits for capacity"
        je.check_invariants(state)
        state, _ = je.drain(state, len(events))
        for event in events:
            if event.flags & je.EngineEventFlags.TURN_FINISHED:
                tokens[event.request_id], ends[event.request_id] = tokens_of(state, event.request_id), event
                state = je.close_request(state, event.request_id)
    return tokens, ends, state


# The example of C11


def test_C11_eight_prompts_of_512_tokens_in_256_blocks_of_16_do_not_stop():
    sessions = [Session(0, (Turn(512, 64),)) for _ in range(8)]
    config = je.EngineConfig(max_batch_size=8, num_blocks=256, block_size=16)
    outcome = simulate(config, sessions, most_steps=1000)
    assert outcome.forced == 0
    # All run one step, then four blocks for each of seven come from the eighth, and so on.
    assert 1 <= outcome.preemptions <= 8
    stuck = simulate(dataclasses.replace(config, preemption="none"), sessions, most_steps=1000)
    assert (stuck.preemptions, stuck.forced) == (0, 1)


def test_C11_four_prompts_that_fill_the_pool_finish_with_the_output_of_each_alone():
    """The same, scaled down: sixteen tokens each in sixteen blocks of four."""
    prompts = [[n] * 16 for n in range(4)]
    tokens, ends, state = served(begun(MODEL, *prompts, limit=10))
    assert tokens == {n + 1: p + continuation(p, 10) for n, p in enumerate(prompts)}
    assert {event.usage for event in ends.values()} == {je.Usage(16, 10)}
    assert 1 <= preemptions(state) <= 4


def test_C11_without_preemption_the_engine_says_that_it_is_blocked_until_something_is_closed():
    with je.Engine(MODEL, dataclasses.replace(SMALL, preemption="none")) as engine:
        requests = [engine.create_request() for _ in range(4)]
        for n, request in enumerate(requests):
            request.begin_turn([n] * 16, je.TurnOptions(2))
        for _ in range(20):
            events = engine.run()
        assert [(event.request, event.flags) for event in events] == [
            (None, je.EngineEventFlags.CAPACITY_BLOCKED)
        ]
        assert events[0].error_code == je.EngineErrorCode.CAPACITY_DEFERRED
        assert engine.metrics.preemptions == 0
        requests.pop().close()
        found = []
        while requests:
            for event in engine.run():
                assert event.flags != je.EngineEventFlags.CAPACITY_BLOCKED
                if event.flags & je.EngineEventFlags.TURN_FINISHED:
                    found.append(event.request.tokens.tolist())
                    requests.remove(event.request)
                    event.request.close()
        assert sorted(found) == [[n] * 16 + continuation([n] * 16, 2) for n in range(3)]


# Output


LETTER = st.integers(0, LETTERS - 1)
GREEDY = je.SamplingParams(temperature=0.0)
SAMPLED = je.SamplingParams(temperature=1.5, top_k=9, seed=7)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: its first turn, and a second one that may be empty."""

    prompt: list[int]
    most: int
    more: list[int]
    sampled: bool


def answers(config, asks):
    """Each request's tokens and what each of its turns counted; and how often somebody gave way."""
    state = je.init_state(MODEL, config)
    for ask in asks:
        options = je.RequestOptions(sampling=SAMPLED if ask.sampled else GREEDY)
        state, request_id = je.create_request(state, options)
        state, _ = je.begin_turn(state, request_id, ask.prompt, je.TurnOptions(ask.most))
    usages = [[] for _ in asks]
    published = [[] for _ in asks]
    evicted = steps = 0
    while has_pending_work(state):
        plan = je.plan_step(state)
        assert plan.outcome == je.StepOutcome.COMMITTED
        evicted += len(plan.evicted)
        state, events = je.step(MODEL, state)
        je.check_invariants(state)
        state, _ = je.drain(state, len(events))
        steps += 1
        assert steps < 2000
        for event in events:
            nth = event.request_id - 1
            if event.flags & je.EngineEventFlags.TOKEN:
                published[nth].append(event.token)
            if event.flags & je.EngineEventFlags.TURN_FINISHED:
                usages[nth].append((event.finish_reason, event.usage))
                if event.turn_id == 1 and asks[nth].more:
                    state, _ = je.begin_turn(
                        state, event.request_id, asks[nth].more, je.TurnOptions(asks[nth].most)
                    )
                else:
                    usages[nth].append(tokens_of(state, event.request_id))
                    state = je.close_request(state, event.request_id)
    assert preemptions(state) == evicted
    return usages, published, evicted


ASKS = st.lists(
    st.builds(
        Ask,
        st.lists(LETTER, min_size=1, max_size=10),
        st.integers(1, 6),
        st.lists(LETTER, max_size=4),
        st.booleans(),
    ),
    min_size=2,
    max_size=6,
)


@given(
    asks=ASKS,
    num_blocks=st.sampled_from([7, 10]),
    chunk=st.sampled_from([None, 1, 3]),
    budget=st.sampled_from([16, 5, 2]),
    bound=st.sampled_from([1, 2, 5, 64]),
    policy=st.sampled_from(list(POLICIES.values())),
)
@example([Ask([n] * 9, 6, [1] * 4, n > 2) for n in range(5)], 7, 1, 5, 2, POLICIES["decode_first"])
@settings(max_examples=15)
@pytest.mark.slow
def test_C11_A15_a_short_pool_changes_no_token_and_no_count(asks, num_blocks, chunk, budget, bound, policy):
    config = dataclasses.replace(
        TIGHT,
        num_blocks=num_blocks,
        chunk_size=chunk,
        max_scheduled_tokens=budget,
        fairness_bound=bound,
        policy=policy,
    )
    usages, published, _ = answers(config, asks)
    expected, roomy, evicted = answers(ROOMY, asks)
    assert (usages, published, evicted) == (expected, roomy, 0)


def test_C11_A15_the_example_of_the_property_does_give_way_and_a_wrong_replay_would_show():
    asks = [Ask([n] * 9, 6, [1] * 4, n > 2) for n in range(5)]
    usages, published, evicted = answers(TIGHT, asks)
    assert evicted > 0
    assert len({tuple(tokens) for tokens in published}) == len(asks)
    for ask, (first, second, tokens) in zip(asks, usages, strict=True):
        assert first[1] == je.Usage(9, 6)
        assert second[1] == je.Usage(4, 6)
        assert len(tokens) == 25
        if not ask.sampled:
            turn = [*ask.prompt, *continuation(ask.prompt, 6), *ask.more]
            assert tokens == turn + continuation(turn, 6)


# Everything ends


@st.composite
def loads(draw):
    num_blocks = draw(st.sampled_from([4, 8, 16]))
    config = je.EngineConfig(
        max_batch_size=draw(st.sampled_from([2, 4, 8])),
        max_scheduled_tokens=draw(st.sampled_from([16, 3, 1])),
        num_blocks=num_blocks,
        block_size=draw(st.sampled_from([1, 2])),
        chunk_size=draw(st.sampled_from([None, 2, 1])),
        fairness_bound=draw(st.sampled_from([1, 1, 2, 64])),
        policy=draw(st.sampled_from(list(POLICIES.values()))),
    )
    most = num_blocks * config.block_size
    sessions = []
    for _ in range(draw(st.integers(2, 6))):
        first = Turn(draw(st.integers(1, most // 2)), draw(st.integers(1, most // 4)))
        second = Turn(1, draw(st.integers(1, most // 4 - 1)) if most > 4 else 0, draw(st.integers(0, 5)))
        turns = (first, second) if second.answer and draw(st.booleans()) else (first,)
        sessions.append(Session(draw(st.integers(0, 9)), turns))
    return config, sessions


def most_steps(config, sessions):
    """A stay brings a token unless one with an older claim takes its blocks, and that one's stay does."""
    stays = sum(turn.answer for session in sessions for turn in session.turns) * (config.max_batch_size + 1)
    return stays * max(session.tokens for session in sessions)


@given(loads())
@settings(max_examples=30)
def test_C11_any_load_ends_with_tiny_bounds_and_replays_in_pieces_too(load):
    config, sessions = load
    outcome = simulate(config, sessions, most_steps(config, sessions))
    assert outcome.forced == 0


@given(loads())
@settings(max_examples=300)
@pytest.mark.slow
def test_C11_any_load_of_many_ends(load):
    config, sessions = load
    outcome = simulate(config, sessions, most_steps(config, sessions))
    assert outcome.forced == 0


@pytest.mark.parametrize("bound", [1, 2, 64])
def test_C11_continuations_of_residents_that_block_each_other_go_one_after_the_other(bound):
    """Both hold two blocks of seven and want four more: the younger one gives its two back."""
    config = dataclasses.replace(TIGHT, fairness_bound=bound)
    state, _ = finish(MODEL, begun(MODEL, [1] * 6, [2] * 6, limit=2, config=config))
    assert len(state.control.free_blocks) == 3
    for request_id in (1, 2):
        state, _ = je.begin_turn(state, request_id, [3] * 14, je.TurnOptions(3))
    plan = je.plan_step(state)
    assert (plan.evicted.tolist(), len(plan.index)) == ([2], 0)
    state, _ = je.step(MODEL, state)
    assert status_of(state, 2) == je.RequestStatus.QUEUED
    while status_of(state, 1) != je.RequestStatus.TURN_COMPLETE:
        state, _ = je.step(MODEL, state)
    state = je.close_request(state, 1)
    state, _ = finish(MODEL, state)
    turn = [2] * 6 + continuation([2] * 6, 2) + [3] * 14
    assert tokens_of(state, 2) == turn + continuation(turn, 3)


def test_C11_the_youngest_gives_way_and_the_oldest_never_does():
    state, youngest = until_preempted(begun(MODEL, [1] * 8, [2] * 8, [3] * 8, limit=9, config=TIGHT))
    assert youngest == 3
    assert column(state, 1, "place") >= 0


def test_C11_finished_residents_keep_their_blocks_and_an_old_one_gives_way_if_only_that_helps():
    """Three of seven blocks belong to a finished session, so the older of two can't go on whatever the other gives."""
    state, _ = finish(MODEL, begun(MODEL, [9] * 11, limit=1, config=TIGHT))
    for prompt in ([1] * 7, [2] * 7):
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt, je.TurnOptions(1))
        state, events = je.step(MODEL, state)
        state, _ = je.drain(state, len(events))
    state, _ = je.begin_turn(state, 2, [1] * 12, je.TurnOptions(1))
    state, _ = je.begin_turn(state, 3, [2] * 3, je.TurnOptions(1))
    assert je.plan_step(state).evicted.tolist() == [2]
    while status_of(state, 3) != je.RequestStatus.TURN_COMPLETE:
        state, _ = je.step(MODEL, state)
    assert je.plan_step(state).outcome == je.StepOutcome.CAPACITY_DEFERRED
    state = je.close_request(je.close_request(state, 1), 3)
    state, _ = finish(MODEL, state)
    turn = [1] * 7 + continuation([1] * 7, 1) + [1] * 12
    assert tokens_of(state, 2) == turn + continuation(turn, 1)


# After giving way


def preempted():
    return until_preempted(begun(MODEL, [1] * 8, [2] * 8, [3] * 8, limit=9, config=TIGHT))


def test_C11_A8_who_gave_way_can_be_cancelled_and_continued():
    state, request_id = preempted()
    kept = tokens_of(state, request_id)
    generated = len(kept) - 8
    assert kept == [3] * 8 + continuation([3] * 8, generated)
    assert generated > 0
    state, cancelled = je.cancel_turn(state, request_id, 1)
    assert cancelled
    event = state.control.events[-1]
    assert (event.finish_reason, event.usage) == (je.FinishReason.CANCELLED, je.Usage(8, generated))
    state, _ = je.drain(state, 1)
    state, turn_id = je.begin_turn(state, request_id, [5, 6], je.TurnOptions(4))
    tokens, ends, _ = served(state)
    assert tokens[request_id] == [*kept, 5, 6, *continuation([*kept, 5, 6], 4)]
    # The input of the cancelled turn and its tokens run again, and count for neither side.
    assert (turn_id, ends[request_id].usage) == (2, je.Usage(2, 4))


def test_C11_A10_who_gave_way_can_be_closed():
    state, request_id = preempted()
    free = len(state.control.free_blocks)
    state = je.close_request(state, request_id)
    assert len(state.control.free_blocks) == free
    tokens, _, state = served(state)
    assert tokens == {n: [n] * 8 + continuation([n] * 8, 9) for n in (1, 2)}
    assert len(state.control.free_blocks) == 7


def test_C11_A15_who_gave_way_is_input_again_up_to_its_last_token_and_its_turn_goes_on():
    state, request_id = preempted()
    length = column(state, request_id, "length")
    assert (column(state, request_id, "processed"), column(state, request_id, "input_end")) == (0, length)
    assert status_of(state, request_id) == je.RequestStatus.QUEUED
    tokens, ends, _ = served(state)
    end = ends[request_id]
    assert (end.turn_id, end.finish_reason) == (1, je.FinishReason.MAX_GENERATED_TOKENS)
    assert end.usage == je.Usage(8, 9)
    assert tokens[request_id] == [3] * 8 + continuation([3] * 8, 9)
