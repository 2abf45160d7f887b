"""C10: what the host does in a step, counted in calls and in log entries read, so that no clock is needed.

Calls are those of Python and of C, counted by the interpreter's profiler; `benchmarks/host_time.py` measures the time.
"""

import gc
import sys

import pytest

import jaxengine as je
from benchmarks.host_time import residents
from jaxengine.logs import Log, LogTable
from jaxengine.toy import toy_model
from jaxengine.transaction import require_executable
from tests.jaxengine.harness import SMALL

MODEL = toy_model()


def calls(function):
    """How many calls `function` makes, and what it returned."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    # A collection in between would call finalizers.
    gc.disable()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, result


def step_calls(model, state):
    """Calls made by planning, executing, committing and draining one step."""
    counts = {}
    counts["plan"], plan = calls(lambda: je.plan_step(state))
    counts["execute"], transaction = calls(lambda: je.execute(model, state, plan))
    counts["commit"], (after, events) = calls(lambda: je.commit(state, transaction, donate=True))
    counts["drain"], _ = calls(lambda: je.drain(after, len(events)))
    return counts


def test_C10_a_step_makes_the_same_calls_at_any_context_length(monkeypatch):
    read = {"entries": 0}

    def counting(original):
        def wrapped(self, *arguments):
            values = original(self, *arguments)
            read["entries"] += values.size
            return values

        return wrapped

    for kind, name in ((Log, "read"), (LogTable, "read")):
        monkeypatch.setattr(kind, name, counting(getattr(kind, name)))
    found = []
    for context in (1_600, 160_000):  # both end at the border of a block
        model, state = residents(4, context)
        read["entries"] = 0
        found.append((step_calls(model, state), read["entries"]))
    assert found[0] == found[1]
    assert found[0][1] <= 4 * 32


@pytest.mark.parametrize("part", ["plan", "execute", "commit", "drain"])
def test_C10_calls_grow_at_most_linearly_with_residents(part):
    small, large = (step_calls(*residents(count, 16))[part] for count in (64, 512))
    assert large <= 8 * small


def test_C10_planning_looks_at_each_waiting_request_once():
    """10,000 against 10: what a waiting request costs is less than one call, since columns are compared as a whole."""
    few, many = (step_calls(*residents(2, 16, waiting))["plan"] for waiting in (10, 10_000))
    assert many - few < 10_000


def test_C10_the_invariants_cost_grows_at_most_linearly_and_not_with_committed_tokens():
    def cost(count, context):
        _, state = residents(count, context)
        return calls(lambda: je.check_invariants(state))[0]

    assert cost(64, 100) == cost(64, 1_000)
    assert cost(512, 16) <= 8 * cost(64, 16)


@pytest.mark.parametrize("refused", [False, True])
def test_D4_the_checks_of_a_plan_and_of_a_transaction_read_no_context(monkeypatch, refused):
    """Whether they pass or refuse: the same calls, and no entry of a table or a sequence, at any context length."""
    found = []
    for context in (1_600, 160_000):
        model, state = residents(4, context)
        plan = je.plan_step(state)
        transaction = je.execute(model, state, plan)
        first = int(state.control.requests.id[0])
        if refused:
            state, _ = je.cancel_turn(state, first, int(state.control.requests.turn[0]))
        with monkeypatch.context() as patch:
            for kind in (Log, LogTable):
                patch.setattr(kind, "read", None)
            found.append(calls(lambda state=state, plan=plan: outcome(require_executable, state, plan)))
            if refused:
                found[-1] += calls(lambda state=state, t=transaction: outcome(je.commit, state, t))
        assert (found[-1][1] is ValueError) == refused
        assert not refused or found[-1][3] is je.StaleTransactionError
    assert found[0] == found[1]


def test_C10_beginning_a_turn_makes_the_same_calls_however_long_the_queue():
    def cost(waiting):
        state = je.init_state(MODEL, SMALL)
        for _ in range(waiting + 1):
            state, request_id = je.create_request(state)
            state, _ = je.begin_turn(state, request_id, [1])
            state, _ = je.cancel_turn(state, request_id, 1)
        state, _ = je.drain(state, 1)
        assert len(state.control.events) == waiting
        return calls(lambda: je.begin_turn(state, 1, [1]))[0]

    assert cost(2) == cost(500)


def outcome(call, *arguments):
    """None, or the type of what was raised."""
    try:
        call(*arguments)
    except (ValueError, je.StaleTransactionError) as error:
        return type(error)
    return None
