"""Static batching: a fixed batch runs to its end, newcomers wait, and only a batch of one takes further turns.

First random commands against a plain-Python twin that knows nothing of blocks or plans but who is in the batch, then
each promise by an example.
"""

import dataclasses
import gc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import initialize

import jaxengine as je
from jaxengine.llm import LLM
from jaxengine.metrics import metrics_of
from jaxengine.toy import CONTEXT, continuation
from tests.cli.tiny_model import write_tiny_folder
from tests.jaxengine.harness import SMALL
from tests.jaxengine.holding import MODEL, STATIC, Held, begin, events_of, occupied, runs
from tests.jaxengine.naive import NaiveEngine, NaivePlan, NaiveRow
from tests.jaxengine.scripts import readable
from tests.jaxengine.serving import differences, serve
from tests.jaxengine.test_commands import EOS, LIMIT, TOKENS, Commands
from tests.jaxengine.test_commands import MODEL as ENDING_MODEL


class NaiveStatic(NaiveEngine):
    """The plain-Python twin with a fixed batch; `members` are the ids of the running one, closed ones too."""

    def __init__(self, config, eos=()):
        super().__init__(config, eos)
        self.members = set()
        self.ran = set()

    @property
    def free_blocks(self):
        return self.config.max_batch_size - len(self.members)

    def residents(self):
        return [request for request in self.requests.values() if request.rank is not None]

    def may_begin(self, request_id, count):
        goes_on = request_id not in self.ran or self.members == {request_id}
        return goes_on and super().may_begin(request_id, count)

    def close(self, request_id):
        super().close(request_id)
        if not self.residents():
            self.members = set()

    def plan(self):
        running = [request for request in self.candidates() if request.rank is not None]
        if not running and self.residents() and self.candidates():
            return NaivePlan([], [], self.residents(), 0)
        chosen = running or self.candidates()
        rows = [NaiveRow(request, 1, request.rank is None) for request in chosen]
        rows = rows[: min(self.config.max_batch_size, self.config.max_scheduled_tokens)]
        budget = self.config.max_scheduled_tokens - len(rows)
        for row in rows:
            if row.request.is_prefill:
                left = len(row.request.tokens) - row.request.processed
                extra = min(budget, min(left, self.config.chunk_size or left) - 1)
                row.count, budget = row.count + extra, budget - extra
        return NaivePlan(rows, [], [], 0)

    def step(self):
        plan = self.plan()
        for request in plan.evicted:
            request.rank, request.blocks, request.processed = None, 0, 0
        if plan.evicted:
            self.members = set()
        else:
            super().step()
            self.members |= {row.request.id for row in plan.rows}
            self.ran |= self.members


class StaticCommands(Commands):
    """Every command of the dynamic engine, and after each step also what the state before it could read."""

    @initialize(
        chunk_size=st.sampled_from([None, 1, 3]),
        budget=st.sampled_from([16, 7, 3, 2, 1]),
        bound=st.sampled_from([64, 1]),
        preemption=st.sampled_from(["recompute", "none"]),
        first=st.lists(st.tuples(TOKENS, LIMIT), min_size=1, max_size=6),
    )
    def start(self, chunk_size, budget, bound, preemption, first):
        config = dataclasses.replace(
            STATIC,
            chunk_size=chunk_size,
            max_scheduled_tokens=budget,
            fairness_bound=bound,
            preemption=preemption,
        )
        self.state = je.init_state(ENDING_MODEL, config)
        self.naive = NaiveStatic(config, EOS)
        self.kept = None
        self.must_copy = False
        for tokens, limit in first:
            self.create(0)
            self.begin(self.naive.last_id, tokens, limit)

    def one_step(self):
        before, written = self.state, readable(self.state, self.state)
        super().one_step()
        for one, other in zip(written, readable(self.state, before), strict=True):
            assert np.array_equal(one, other)
        assert metrics_of(self.state).preemptions == metrics_of(self.state).deferred_rows == 0


StaticCommands.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestStaticCommands(StaticCommands.TestCase):
    """O1, O2, E8: random commands, against the twin."""


@given(
    prompts=st.lists(TOKENS, min_size=1, max_size=5),
    arrivals=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    chunk_size=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=30)
def test_O1_E6_logits_are_those_of_the_dynamic_engine(prompts, arrivals, chunk_size):
    """Whatever else is in either batch, bit for bit, and so the tokens are those of `toy.continuation`."""
    sampling = [je.SamplingParams(temperature=0.7 * (i % 2), seed=i) for i in range(len(prompts))]
    served = [
        serve(
            MODEL,
            dataclasses.replace(config, chunk_size=chunk_size),
            list(map(np.array, prompts)),
            most=4,
            arrivals=arrivals[: len(prompts)],
            sampling=sampling,
        )
        for config in (STATIC, SMALL)
    ]
    assert served[0].tokens == served[1].tokens
    assert not differences(*served)
    for prompt, tokens in list(zip(prompts, served[0].tokens, strict=True))[::2]:
        assert tokens == continuation(prompt, 4)


@pytest.fixture
def engine():
    with Held() as engine:
        yield engine


def test_O1_newcomers_wait_for_the_whole_batch_and_then_start_together(engine):
    begin(engine, [1], [2], limit=3)
    assert runs(engine, 1) == [[1, 2]]
    begin(engine, [3], [4], limit=1)
    assert runs(engine) == [[1, 2], [1, 2], [3, 4]]
    assert engine.metrics.steps == 4
    assert engine.metrics.deferred_rows == engine.metrics.preemptions == 0


def test_O1_a_batch_takes_all_that_wait_up_to_the_rows_of_a_step(engine):
    begin(engine, *[[i] for i in range(7)], limit=1)
    assert runs(engine) == [[1, 2, 3], [4, 5, 6], [7]]
    with Held(dataclasses.replace(STATIC, max_scheduled_tokens=2)) as narrow:
        begin(narrow, [1], [2], [3], limit=1)
        assert runs(narrow) == [[1, 2], [3]]


def test_O1_B5_a_prompt_longer_than_a_step_is_run_over_several_and_the_batch_stays_together():
    with Held(dataclasses.replace(STATIC, chunk_size=4)) as engine:
        long, short = begin(engine, [5] * 10, [6], limit=3)
        assert runs(engine) == [[2], [2], [2, 1], [1], [1]]
        assert long.tokens.tolist() == [5] * 10 + continuation([5] * 10, 3)
        assert short.tokens.tolist() == [6, *continuation([6], 3)]


def test_O1_A10_a_closed_member_is_never_heard_of_again_and_keeps_its_storage_until_the_batch_is_over(engine):
    first, second, waiting = begin(engine, [1], [2], [3], limit=4)
    waiting.close()
    assert runs(engine, 1) == [[1, 2]]
    (last,) = begin(engine, [4], limit=1)
    assert occupied(engine) == 2
    first.close()
    assert (first.status, first.tokens.tolist()) == (je.RequestStatus.CLOSED, [])
    assert occupied(engine) == 2
    assert engine.metrics.residents == 1
    assert runs(engine) == [[2], [2], [2], [4]]
    assert second.tokens.tolist() == [2, *continuation([2], 4)]
    assert last.tokens.tolist() == [4, *continuation([4], 1)]
    assert occupied(engine) == 1


def test_O1_A10_the_last_member_to_be_closed_gives_all_storage_back(engine):
    members = begin(engine, [1], [2])
    runs(engine, 1)
    for request, left in zip(members, [2, 0], strict=True):
        request.close()
        request.close()
        assert occupied(engine) == left
    assert not engine.has_pending_requests()
    begin(engine, [3], limit=1)
    assert runs(engine) == [[3]]


def test_O1_A10_a_member_closed_with_undrained_events_takes_them_along(engine):
    _, second = begin(engine, [1], [2])
    assert [event.request.id for event in engine.run(1)] == [1]
    second.close()
    assert runs(engine) == [[1]]


def test_O1_A10_a_request_outside_the_batch_is_freed_at_once(engine):
    begin(engine, [1], limit=4)
    runs(engine, 1)
    new = engine.create_request()
    queued, cancelled = begin(engine, [2], [3])
    cancelled.cancel_turn(1)
    engine.run()
    for request in (new, queued, cancelled):
        request.close()
    assert engine.state.control.requests.id.tolist() == [1]
    assert occupied(engine) == 1
    assert runs(engine) == [[1]] * 3


def test_O1_A11_a_dropped_member_is_like_a_closed_one(engine):
    begin(engine, [1], [2], limit=3)
    runs(engine, 1)
    engine.held.pop(0)
    gc.collect()
    assert engine.has_pending_requests()
    assert (occupied(engine), engine.metrics.residents) == (2, 1)
    assert runs(engine) == [[2]] * 2
    engine.held.clear()
    gc.collect()
    assert not engine.has_pending_requests()
    assert occupied(engine) == 0


def test_O1_A8_turns_are_cancelled_in_and_outside_the_batch(engine):
    first, second = begin(engine, [1], [2], limit=5)
    runs(engine, 1)
    (outside,) = begin(engine, [3])
    assert outside.cancel_turn(1)
    assert first.cancel_turn(1)
    assert not first.cancel_turn(1)
    reasons = [(event.request.id, event.finish_reason) for event in engine.run()]
    assert reasons == [(3, je.FinishReason.CANCELLED), (1, je.FinishReason.CANCELLED)]
    outside.begin_turn([4], je.TurnOptions(1))
    assert runs(engine, 1) == [[2]]
    assert second.cancel_turn(1)
    assert runs(engine) == [[2], [3]]
    assert outside.tokens.tolist() == [3, 4, *continuation([3, 4], 1)]


def test_O2_a_batch_of_one_goes_on_under_each_turns_own_limit(engine):
    (only,) = begin(engine, [1, 2, 3], limit=2)
    expected = [1, 2, 3]
    for turn, (tokens, limit) in enumerate([([4], 1), ([5, 6], 3), ([7], 2)], start=2):
        runs(engine)
        expected = only.tokens.tolist()
        assert only.begin_turn(tokens, je.TurnOptions(limit)) == turn
        expected += [*tokens, *continuation(expected + tokens, limit)]
        ended = [event for _ in range(limit) for event in engine.run()][-1]
        assert ended.finish_reason == je.FinishReason.MAX_GENERATED_TOKENS
        assert ended.usage == je.Usage(len(tokens), limit)
        assert only.tokens.tolist() == expected
        assert occupied(engine) == 1


def test_O2_a_batch_of_one_goes_on_before_others_that_wait(engine):
    """It is the running batch once more: only one that is through for good makes room."""
    (only,) = begin(engine, [1], limit=1)
    runs(engine)
    begin(engine, [2], limit=1)
    only.begin_turn([3], je.TurnOptions(2))
    assert runs(engine) == [[1], [1], [2]]


def test_O2_A4_a_member_among_others_does_not_go_on(engine):
    """Not even once the others are closed: their rows are still there."""
    first, second = begin(engine, [1], [2])
    runs(engine)
    for _ in range(2):
        before = engine.state
        with pytest.raises(je.RequestStateError, match=r"request 1 was batched with others, .* one member"):
            first.begin_turn([3])
        assert engine.state is before
        second.close()
    assert not engine.has_pending_requests()


def test_O2_A4_a_member_of_a_recycled_batch_does_not_go_on_but_can_still_be_read(engine):
    (only,) = begin(engine, [1])
    runs(engine)
    (later,) = begin(engine, [2])
    assert runs(engine) == [[2], [2]]
    with pytest.raises(je.RequestStateError, match="request 1 has lost its static batch to a later one"):
        only.begin_turn([3])
    assert only.status == je.RequestStatus.TURN_COMPLETE
    assert only.tokens.tolist() == [1, *continuation([1], 2)]
    assert not only.cancel_turn(1)
    only.close()
    assert occupied(engine) == 1
    assert later.begin_turn([3], je.TurnOptions(1)) == 2


def test_O2_A8_a_cancelled_turn_of_a_batch_of_one_leaves_its_input_for_the_next(engine):
    (only,) = begin(engine, [1, 2])
    runs(engine)
    held = only.tokens.tolist()
    assert only.begin_turn([3]) == 2
    assert only.cancel_turn(2)
    engine.run()
    assert only.begin_turn([4], je.TurnOptions(3)) == 3
    runs(engine)
    assert only.tokens.tolist() == [*held, 3, 4, *continuation([*held, 3, 4], 3)]


def test_O2_A5_a_session_ends_in_the_last_slot_of_its_row(engine):
    """The row holds the longest session and not one slot more."""
    (only,) = begin(engine, [1] * (CONTEXT - 4), limit=1)
    runs(engine)
    with pytest.raises(ValueError, match=f"would hold {CONTEXT} tokens of at most {CONTEXT}"):
        only.begin_turn([1] * 3)
    only.begin_turn([2])
    assert events_of(engine)[-1].finish_reason == je.FinishReason.MAX_SESSION_TOKENS
    assert only.length == CONTEXT


def test_O1_an_llm_fills_each_batch_from_all_its_prompts(tmp_path):
    """Five prompts of six tokens in batches of two, then each by itself."""
    prompts = ["hello", "a b c", "12 12", "x", "the quick brown fox"]
    config = je.EngineConfig(max_batch_size=2, batching="static")
    with LLM(write_tiny_folder(tmp_path), config) as llm:
        completions = llm.generate(prompts, max_tokens=6)
        assert llm._engine.metrics.steps == 3 * 6
        assert completions == [llm.generate(prompt, max_tokens=6)[0] for prompt in prompts]
        assert llm._engine.metrics.free_blocks == llm._engine.metrics.num_blocks
