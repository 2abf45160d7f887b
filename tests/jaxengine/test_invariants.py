"""The checker itself: each rule is broken by hand and must be named (P1)."""

import dataclasses

import numpy as np
import pytest

import jaxengine as je
from jaxengine.logs import LogTable
from jaxengine.state import replace_rows
from jaxengine.toy import toy_model
from tests.jaxengine.harness import SMALL, begun

MODEL = toy_model()


@pytest.fixture(scope="module")
def healthy():
    """Requests 1 in decode, 2 in the middle of its prefill, 3 complete, 4 waiting for blocks, 5 without a turn."""
    config = dataclasses.replace(SMALL, chunk_size=6)
    state = begun(MODEL, [1, 2, 3], [2] * 20, config=config)
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, [3] * 5, je.TurnOptions(1))
    state, _ = je.step(MODEL, state)
    state, request_id = je.create_request(state)
    state, _ = je.begin_turn(state, request_id, [4] * 60)
    state, _ = je.create_request(state)
    assert state.control.requests.status.tolist() == [2, 2, 3, 1, 0]
    return state


def changed(state, row, **values):
    return state.replace(control=replace_rows(state.control, row, **values))


def rewritten(state, row, blocks=None, tokens=None):
    """`state` with a row's table or tokens replaced."""

    def rewrite(table, values):
        if values is None:
            return table
        rows = [table.read(i, 0, int(n)) for i, n in enumerate(table.lengths)]
        rows[row] = np.array(values, np.int32)
        made = LogTable.empty()
        for i, entries in enumerate(rows):
            made = made.add_row().extend(i, entries)
        return made

    control = state.control
    return state.replace(
        control=control.replace(
            blocks=rewrite(control.blocks, blocks), tokens=rewrite(control.tokens, tokens)
        )
    )


def with_free(state, free):
    return state.replace(control=state.control.replace(free_blocks=np.array(free, np.int32)))


def free(state):
    return state.control.free_blocks.tolist()


def table(state, row):
    return state.control.blocks.read(row, 0, int(state.control.blocks_held[row])).tolist()


def test_P1_a_healthy_state_passes(healthy):
    je.check_invariants(healthy)
    je.check_invariants(je.init_state(MODEL, SMALL))


RULES = {
    "a block lost": (lambda s: with_free(s, free(s)[1:]), "block 15 has 0 owners"),
    "a block free twice": (lambda s: with_free(s, [*free(s), free(s)[0]]), "block 15 has 2 owners"),
    "a held block is free": (lambda s: with_free(s, [*free(s), table(s, 0)[0]]), "block 0 has 2 owners"),
    "a free block outside": (lambda s: with_free(s, [*free(s), 16]), "block 16 is outside the pool"),
    "a held block outside": (lambda s: rewritten(s, 0, blocks=[-1]), "block -1 is outside the pool"),
    "a block in two tables": (lambda s: rewritten(s, 0, blocks=[table(s, 1)[0]]), "has 2 owners"),
    "a block twice in a table": (
        lambda s: rewritten(s, 1, blocks=[*table(s, 1)[:4], table(s, 1)[0]]),
        "has 2 owners",
    ),
    "two residents in a place": (lambda s: changed(s, 1, place=0), "place 0 has 2 residents"),
    "a place outside": (lambda s: changed(s, 0, place=4), "request 1: its place is outside the block table"),
    "no rank": (lambda s: changed(s, 0, order=-1), "request 1: it has a place without an admission rank"),
    "a rank and no place": (lambda s: changed(s, 4, order=9), "request 5: .* or the reverse"),
    "blocks and no place": (
        lambda s: changed(s, 2, place=-1, order=-1),
        "request 3: it holds blocks without being resident",
    ),
    "too few blocks": (
        lambda s: rewritten(s, 2, blocks=[]),
        "request 3: its table is shorter than its committed slots",
    ),
    "too many blocks": (
        lambda s: with_free(rewritten(s, 0, blocks=[*table(s, 0), free(s)[-1]]), free(s)[:-1]),
        "request 1: it holds more blocks than its committed slots need",
    ),
    "a table too wide": (lambda s: rewritten(s, 1, blocks=range(17)), "request 2: its table is wider"),
    "processed beyond its tokens": (
        lambda s: changed(s, 2, processed=7),
        "request 3: more is processed than it has tokens",
    ),
    "longer than its limit": (
        lambda s: changed(s, 2, max_session=5),
        "request 3: it is longer than its session limit",
    ),
    "a token too many": (
        lambda s: rewritten(s, 2, tokens=[1] * 7),
        "request 3: its token log and its length differ",
    ),
    "live with nothing to run": (
        lambda s: changed(s, 0, processed=4),
        "request 1: it is live with nothing left to run",
    ),
    "a decode of two tokens": (
        lambda s: changed(rewritten(s, 0, tokens=[1] * 5), 0, length=5),
        "request 1: it decodes with other than one unprocessed token",
    ),
    "an event uncounted": (
        lambda s: changed(s, 0, undrained=9),
        "request 1: its events in the queue are not as many as it counts",
    ),
    "an event of nobody": (
        lambda s: je.requests.publish(s, je.EventRecord(99, 1, je.EngineEventFlags.TOKEN)),
        "request 99: it has events but is not there",
    ),
    "a suspect at rest": (
        lambda s: s.replace(control=s.control.replace(suspects=((1,), (2, 3)))),
        "request 3: it is a suspect without a live turn",
    ),
    "a suspect that is closed": (
        lambda s: s.replace(control=s.control.replace(suspects=((9,),))),
        "request 9: it is a suspect without a live turn",
    ),
    "active without a place": (
        lambda s: changed(s, 3, status=2),
        "request 4: it is active without being resident",
    ),
}


@pytest.mark.parametrize(("broken", "words"), RULES.values(), ids=RULES)
def test_P1_each_broken_rule_is_named(healthy, broken, words):
    with pytest.raises(je.InvariantViolation, match=words):
        je.check_invariants(broken(healthy))


def test_P1_all_violations_are_named_at_once(healthy):
    broken = changed(changed(healthy, 2, max_session=5), 0, place=4)
    with pytest.raises(je.InvariantViolation, match=r"request 1: .*; request 3: "):
        je.check_invariants(broken)


def test_P1_a_spent_state_is_no_violation_but_an_error_of_the_caller():
    state = begun(MODEL, [1])
    je.step(MODEL, state)
    with pytest.raises(je.SpentStateError, match="use the state that commit returned"):
        je.check_invariants(state)


def test_P1_the_checks_do_not_depend_on_how_tables_came_about(healthy):
    je.check_invariants(rewritten(healthy, 1, blocks=table(healthy, 1), tokens=[2] * 20))
