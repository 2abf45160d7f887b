"""Random commands and faults on an `Engine`, which after each must agree with its plain-Python twin in all that can be
seen, and keep every invariant: A1 to A5, A7 to A13, B1 to B6, B9, C9, C11, E2, F1 to F9, M1, M2, M4,
M5, P1 and P2.
"""

import collections
import contextlib
import copy
import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jaxengine as je
from jaxengine.requests import has_pending_work
from jaxengine.toy import ALL_MASKED, CONTEXT, LETTERS, NAN, VOCAB, continuation, toy_model
from tests.jaxengine.harness import assert_same, leaves
from tests.jaxengine.naive import LIVE
from tests.jaxengine.scripts import with_own_store
from tests.properties.naive_engine import NaiveServer

EOS = (3, 17)
MODEL = toy_model(eos=EOS)
TIGHT = je.EngineConfig(max_batch_size=3, max_scheduled_tokens=7, num_blocks=7, block_size=4)
"""28 slots for three requests that may hold 64 tokens each: every kind of shortage comes up."""
MOST_REQUESTS = 7

DONE = collections.Counter()
"""Commands, faults and events by name, over all examples."""

WHICH = st.integers(0, MOST_REQUESTS - 1)
LIMIT = st.integers(0, 6)
CAPACITY = st.sampled_from([100, 1, 2])
TOKENS = st.builds(
    lambda start, count, stride, last: [(start + i * stride) % LETTERS for i in range(count)] + last,
    st.integers(0, LETTERS - 1),
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([[]] * 12 + [[NAN], [ALL_MASKED]]),
)
DRAFTS = st.tuples(
    st.integers(0, 8), st.sampled_from([None, None, *range(8)]), st.sampled_from([*range(VOCAB), *EOS, *EOS])
)
"""How many right ones, where one is another, and which."""
WRONG_TOKENS = st.sampled_from([[], [VOCAB], [-1], [1] * CONTEXT])

STAGES = st.sampled_from(je.Stage)
ERRORS = {"retryable": je.RetryableStepError, "memory": MemoryError, "unknown": RuntimeError}
KINDS = st.sampled_from(sorted(ERRORS))


def seen(events):
    """What an event says, as a record; its text is for people."""
    return [
        je.EventRecord(
            event.request.id if event.request else 0,
            **{
                name: getattr(event, name)
                for name in ("turn_id", "flags", "token", "finish_reason", "error_code", "usage")
            },
        )
        for event in events
    ]


class Machine(RuleBasedStateMachine):
    """`handles` are the user's, `kept_events` keep some requests alive without one."""

    @initialize(
        limits=st.tuples(
            st.sampled_from([None, 1, 3, 5]),
            st.sampled_from([16, 7, 5, 2, 1]),
            st.sampled_from([64, 4, 2, 1]),
        ),
        preemption=st.sampled_from(["recompute", "none"]),
        failure_policy=st.sampled_from(["stop", "isolate"]),
        retries=st.integers(0, 2),
        tokens=TOKENS,
    )
    def start(self, limits, preemption, failure_policy, retries, tokens):
        chunk_size, budget, bound = limits
        self.config = dataclasses.replace(
            TIGHT,
            chunk_size=chunk_size,
            max_scheduled_tokens=budget,
            fairness_bound=bound,
            preemption=preemption,
            failure_policy=failure_policy,
            max_row_retries=retries,
        )
        self.new_engine()
        self.refill(tokens, 3, 4)

    def new_engine(self):
        self.engine = je.Engine(MODEL, self.config)
        self.twin = NaiveServer(self.config, EOS)
        self.handles = {}
        self.kept_events = {}
        self.kept = None

    def pick(self, which):
        """The id of one of the handles: the newest come up most."""
        ids = list(self.handles)
        return ids[-1 - which % len(ids)]

    def did(self, command):
        """Counts a command and compares everything that can be seen."""
        DONE[command] += 1
        DONE["commands"] += 1
        state, twin = self.engine.state, self.twin
        je.check_invariants(state)
        columns = state.control.requests
        assert columns.id.tolist() == list(twin.requests)
        for row, request in enumerate(twin.requests.values()):
            assert columns.status[row] == request.status
            assert (columns.place[row] >= 0) == (request.rank is not None)
            assert state.control.blocks_held[row] == request.blocks
            assert list(columns.carried[row].drafts) == request.drafts
        for request_id, handle in self.handles.items():
            if request_id in twin.requests:
                request = twin.requests[request_id]
                assert handle.status == request.status
                assert handle.length == len(request.tokens)
                assert handle.processed_length == request.processed
                assert handle.turn_id == request.turn
                assert handle.max_session_tokens == request.max_session
                assert handle.tokens.tolist() == request.tokens
            else:
                assert handle.status == je.RequestStatus.CLOSED
        assert has_pending_work(state) == twin.has_pending
        assert (state.control.failure is not None) == twin.stopped
        assert [dataclasses.replace(event, detail="") for event in state.control.events] == twin.events
        metrics = self.engine.metrics
        assert metrics.steps == twin.steps
        assert metrics.rolled_back_steps == twin.failed_steps
        assert metrics.deferred_rows == twin.deferrals
        assert metrics.preemptions == twin.preemptions
        assert (metrics.drafted_tokens, metrics.accepted_drafts) == (twin.drafted, twin.accepted)
        assert metrics.free_blocks == twin.free_blocks
        assert metrics.residents == sum(request.rank is not None for request in twin.requests.values())

    # Requests and turns

    @rule(limit=st.sampled_from([0, 0, 9, 20, 2, CONTEXT + 1]))
    @precondition(lambda self: len(self.twin.requests) < MOST_REQUESTS)
    def create(self, limit):
        self.create_request(limit)

    def create_request(self, limit):
        self.twin.enter()
        options = je.RequestOptions(max_session_tokens=limit)
        if self.twin.stopped or limit > CONTEXT:
            with pytest.raises(je.EngineError if self.twin.stopped else ValueError):
                self.engine.create_request(options)
        else:
            handle = self.engine.create_request(options)
            assert handle.id == self.twin.create(limit)
            self.handles[handle.id] = handle
        self.did("create")

    @rule(which=WHICH, tokens=st.one_of(TOKENS, TOKENS, TOKENS, WRONG_TOKENS), limit=LIMIT)
    @precondition(lambda self: self.handles)
    def begin_turn(self, which, tokens, limit):
        self.begin(self.pick(which), tokens, limit)

    def begin(self, request_id, tokens, limit):
        handle, options = self.handles[request_id], je.TurnOptions(limit)
        self.twin.enter()
        refused = self.twin.refusal(request_id, tokens)
        if refused is None:
            assert handle.begin_turn(tokens, options) == self.twin.begin(request_id, tokens, limit)
        else:
            with pytest.raises(refused):
                handle.begin_turn(tokens, options)
        self.did("begin, refused" if refused else "begin")

    @rule(which=WHICH, drafts=DRAFTS, kind=st.sampled_from(["fitting", "fitting", "any", "outside"]))
    @precondition(lambda self: self.handles)
    def propose(self, which, drafts, kind):
        self.propose_for(self.pick(which), drafts, kind)

    def propose_for(self, request_id, drafts, kind="fitting"):
        """M1: right and wrong drafts, too many, or with a token that there is not."""
        self.twin.enter()
        count, at, token = drafts
        request, proposal = self.twin.requests.get(request_id), [token] * count
        if request is not None and request.tokens:
            proposal = continuation(request.tokens, count)
            if at is not None and at < count:
                proposal[at] = token
            if kind != "any":
                proposal = proposal[: max(self.twin.most_drafts(request_id), 0)]
        if kind == "outside":
            proposal.append(VOCAB)
        if refused := self.twin.draft_refusal(request_id, proposal):
            with pytest.raises(refused):
                self.handles[request_id].set_draft_tokens(proposal)
        else:
            self.handles[request_id].set_draft_tokens(proposal)
            self.twin.propose(request_id, proposal)
        self.did("propose, refused" if refused else "propose")

    @rule(
        drafts=st.lists(DRAFTS, min_size=1, max_size=3),
        steps=st.integers(2, 8),
        tokens=TOKENS,
        limit=st.sampled_from([0, 6, 9]),
    )
    def speculate(self, drafts, steps, tokens, limit):
        """Proposals for everybody who takes one, before each step."""
        for nth in range(steps):
            self.drain()
            self.unblock()
            if nth == 0 and not any(request.status in LIVE for request in self.twin.requests.values()):
                self.refill(tokens, limit, 3)
            for request_id in list(self.handles):
                if self.twin.draft_refusal(request_id, []) is None:
                    self.propose_for(request_id, drafts[(nth + request_id) % len(drafts)])
            accepted, drafted = self.twin.accepted, self.twin.drafted
            self.run_once(100)
            DONE["drafts run"] += self.twin.drafted - drafted
            DONE["drafts accepted"] += self.twin.accepted - accepted
            self.did("run with drafts")

    @rule(which=WHICH, how=st.sampled_from(["cancel", "cancel", "cancel stale", "close", "drop"]))
    @precondition(lambda self: self.handles)
    def end(self, which, how):
        request_id = self.pick(which)
        if how == "close":
            self.close_request(request_id)
        elif how == "drop":
            self.drop(request_id)
        else:
            self.cancel(request_id, how)

    def cancel(self, request_id, how):
        self.twin.enter()
        request = self.twin.requests.get(request_id)
        if request is None or request.turn == 0:
            with pytest.raises(je.RequestStateError):
                self.handles[request_id].cancel_turn(1)
        else:
            turn = request.turn - (how == "cancel stale")
            assert self.handles[request_id].cancel_turn(turn) == self.twin.cancel(request_id, turn)
        self.did(how)

    def close_request(self, request_id):
        self.handles[request_id].close()
        self.twin.enter()
        self.twin.close(request_id)
        self.did("close")

    def drop(self, request_id):
        """A11: a request goes with its last handle, unless an event keeps it."""
        del self.handles[request_id]
        if request_id not in self.kept_events:
            self.twin.abandoned.append(request_id)
        self.did("drop")

    @rule()
    @precondition(lambda self: self.kept_events)
    def drop_kept_events(self):
        self.twin.abandoned += [
            request_id for request_id in self.kept_events if request_id not in self.handles
        ]
        self.kept_events.clear()
        self.did("drop events")

    # Running

    def run_once(self, capacity, keep=False):
        preemptions = self.twin.preemptions
        try:
            expected = self.twin.run(capacity)
        except (je.EngineError, RuntimeError, MemoryError) as error:
            with pytest.raises(type(error)):
                self.engine.run(capacity)
            return
        events = self.engine.run(capacity)
        assert seen(events) == list(expected)
        if self.twin.preemptions > preemptions:
            DONE["preemption"] += self.twin.preemptions - preemptions
        for event in expected:
            DONE[f"event {event.flags.name} {event.finish_reason.name} {event.error_code.name}"] += 1
        if keep:
            self.kept_events |= {event.request.id: event for event in events[-1:] if event.request}

    @rule(capacity=CAPACITY, keep=st.booleans())
    def run(self, capacity, keep):
        self.run_once(capacity, keep)
        self.did("run")

    @rule(count=st.integers(1, 8))
    def run_on(self, count):
        self.run_steps(count)

    def run_steps(self, count):
        for _ in range(count):
            self.unblock()
            self.run_once(100)
            self.did("run")

    @rule(which=WHICH)
    @precondition(lambda self: self.handles)
    def pull(self, which):
        request_id = self.pick(which)
        events, expected = self.engine.pull(self.handles[request_id]), self.twin.pull(request_id)
        assert (events is None) == (expected is None)
        assert seen(events or []) == list(expected or ())
        self.did("pull")

    @rule(how=st.sampled_from(["has_pending_requests", "run nothing"]))
    def ask(self, how):
        if how == "run nothing":
            self.run_once(0)
        else:
            self.look()
        self.did(how)

    def look(self):
        self.twin.enter()
        assert self.engine.has_pending_requests() == self.twin.has_pending

    @rule(tokens=TOKENS, limit=LIMIT, count=st.integers(1, MOST_REQUESTS), steps=st.integers(0, 6))
    def serve(self, tokens, limit, count, steps):
        self.refill(tokens, limit, count)
        self.run_steps(steps)

    def refill(self, tokens, limit, count):
        """What a server does: drains, closes or goes on with whoever has finished, and takes new requests in."""
        self.drain()
        if self.twin.stopped:
            if self.kept is None or self.kept[1].stopped:
                self.new_engine()
            else:
                self.go_back()
        for request_id in list(self.handles):
            if request_id not in self.twin.requests or self.twin.refusal(request_id, tokens) is ValueError:
                self.close_request(request_id)
                del self.handles[request_id]
        self.unblock()
        while len(self.twin.requests) < count:
            self.create_request(20 if limit % 2 else 0)
        for request_id in list(self.handles):
            if request_id in self.twin.requests and self.twin.requests[request_id].status not in LIVE:
                self.begin(request_id, tokens, limit)

    def unblock(self):
        """Closes whoever holds most blocks if nobody can go on."""
        ids = [request_id for request_id in self.handles if request_id in self.twin.requests]
        if ids and self.twin.is_blocked:
            self.close_request(max(ids, key=lambda request_id: self.twin.requests[request_id].blocks))

    def drain(self):
        while self.twin.events:
            self.run_once(100)
            self.did("run")

    # Faults

    @rule(
        planned=st.lists(st.tuples(STAGES, KINDS, st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=2),
        again=st.sampled_from([0, 0, 1, 2, 3]),
        times=st.integers(1, 5),
        tokens=TOKENS,
    )
    def run_with_faults(self, planned, again, times, tokens):
        """F8, F9: one or several faults; a step that failed has changed nothing but what the twin says."""
        if not self.twin.live:
            self.refill(tokens, 3, 4)
        planned = planned + planned[:1] * again
        with self.armed([(stage, ERRORS[kind]("injected"), skip) for stage, kind, skip in planned]):
            for _ in range(times):
                self.drain()
                self.unblock()
                self.run_once(100)
                self.did("run with a fault")

    @contextlib.contextmanager
    def armed(self, planned):
        """Lets both sides fail where it is planned."""
        with contextlib.ExitStack() as stack:
            faults = [
                stack.enter_context(je.inject_fault(stage, error, skip=skip))
                for stage, error, skip in planned
            ]
            self.twin.armed = [je.Fault(stage, error, skip) for stage, error, skip in planned]
            yield
        for fault, twin in zip(faults, self.twin.armed, strict=True):
            assert fault.fired == twin.fired
            if fault.fired:
                kind = next(kind for kind, error in ERRORS.items() if type(fault.error) is error)
                DONE[f"fault {fault.stage.name} {kind}"] += 1
            # The traceback holds frames, and these hold events and their handles.
            fault.error.__traceback__ = None
        self.twin.armed = []

    @rule(nth=st.integers(0, 2), outcomes=st.lists(st.booleans(), min_size=1, max_size=4), tokens=TOKENS)
    def run_with_bad_logits(self, nth, outcomes, tokens):
        """F7: what fails on one row is counted against it, until one of its steps comes through."""
        if not self.twin.live:
            self.refill(tokens, 3, 4)
        for good in outcomes:
            self.drain()
            self.unblock()
            # Reclaims requests whose handles are gone, so that the plan is the one that the step will make.
            self.look()
            rows = [] if self.twin.stopped else self.twin.plan().rows
            ids = [row.request.id for row in rows][nth % max(len(rows), 1) :][:1]
            error = je.RetryableStepError("injected", tuple(ids))
            with self.armed([] if good else [(je.Stage.LOGITS, error, 0)]):
                self.run_once(100)
            self.did("run with bad logits")

    # States as values

    @rule(what=st.sampled_from(["keep", "keep", "go back", "go back", "detach and attach", "close"]))
    def handle_state(self, what):
        if what == "keep":
            state = with_own_store(self.engine.state)
            self.kept = state, copy.deepcopy(self.twin), leaves(state)
        elif what == "go back" and self.kept is not None:
            self.go_back()
        elif what == "detach and attach":
            self.twin.enter()
            self.attach(self.engine.detach())
        elif what == "close":
            self.engine.close()
            self.expect_tombstones()
            self.new_engine()
        self.did(f"state: {what}")

    def go_back(self):
        state, twin, expected = self.kept
        assert_same(expected, leaves(state))
        self.engine.detach()
        self.twin = copy.deepcopy(twin)
        self.attach(with_own_store(state))

    def attach(self, state):
        self.expect_tombstones()
        older = list(self.handles.values())
        self.handles = self.engine.attach(state)
        self.kept_events = {}
        self.twin.abandoned = []
        assert list(self.handles) == list(self.twin.requests)
        assert all(handle.status == je.RequestStatus.CLOSED for handle in older)

    def expect_tombstones(self):
        for handle in self.handles.values():
            assert handle.status == je.RequestStatus.CLOSED
            assert handle.length == handle.turn_id == 0
            with pytest.raises(je.RequestStateError):
                handle.begin_turn([1])


@pytest.mark.slow
def test_P2_F8_random_commands_and_faults_agree_with_the_twin(thorough):
    wanted = 500_000 if thorough else 12_000
    for seed in itertools.count():
        if DONE["commands"] >= wanted and (not missing() or DONE["commands"] >= 2 * wanted):
            break
        # Small batches of examples, so that Hypothesis need not remember half a million choices.
        if hypothesis.settings().derandomize:
            hypothesis.seed(seed)(Machine)
        settings = hypothesis.settings(max_examples=25, stateful_step_count=60, deadline=None)
        run_state_machine_as_test(Machine, settings=settings)
    print(*(f"{count:8d} {name}" for name, count in sorted(DONE.items())), sep="\n")
    assert not missing()


def missing():
    """What has to happen and has not: every fault, every way for a turn to end, every error."""
    seen = set(DONE) | {word for name in DONE if name.startswith("event") for word in name.split()}
    return {
        "preemption",
        "propose, refused",
        "drafts accepted",
        *(f"fault {stage.name} {kind}" for stage in je.Stage for kind in ERRORS),
        *(reason.name for reason in je.FinishReason if reason is not je.FinishReason.STOP_STRING),
        # A decoder without text follows no grammar.
        *(code.name for code in je.EngineErrorCode if code is not je.EngineErrorCode.GUIDANCE_FAILURE),
    } - seen
