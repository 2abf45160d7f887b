"""Fixed states in the engine, with the hybrid toy decoder, whose tokens plain Python knows."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine import toy
from jaxengine.fixed_state import BANKS, RowStates, StateRows, after_prefix
from jaxengine.programs import bucket_for, destinations, pack
from onnx_import import FixedSpec
from tests.jaxengine.harness import begun, tokens_of

MODEL = toy.toy_model(hybrid=True)
CONFIG = je.EngineConfig(
    max_batch_size=3, max_scheduled_tokens=16, num_blocks=12, block_size=4, check_invariants=True
)
PROMPT = st.lists(st.integers(0, toy.LETTERS - 1), min_size=1, max_size=20)
PROMPTS = st.lists(PROMPT, min_size=1, max_size=6)


def run_all(engine, prompts, limit):
    """Every prompt's tokens and what came of it; a request leaves once it is done, so that slots are used again."""
    places = {}
    for place, prompt in enumerate(prompts):
        request = engine.create_request()
        request.begin_turn(prompt, je.TurnOptions(max_generated_tokens=limit))
        places[request] = place
    found = [[] for _ in prompts]
    while engine.has_pending_requests():
        for event in engine.run():
            if event.request is not None and je.EngineEventFlags.TURN_FINISHED in event.flags:
                found[places[event.request]] = event.request.tokens.tolist()
                event.request.close()
    return found


def alone(prompts, limit):
    return [[*prompt, *toy.continuation(prompt, limit, hybrid=True)] for prompt in prompts]


@settings(max_examples=25)
@given(prompts=PROMPTS, limit=st.integers(1, 6), chunk=st.integers(1, 9), blocks=st.sampled_from([7, 12]))
def test_I1_I3_C3_C11_every_request_has_its_own_state(prompts, limit, chunk, blocks):
    """Packed in any company, cut anywhere, in slots that others had before, and run again after preemption."""
    with je.Engine(MODEL, dataclasses.replace(CONFIG, chunk_size=chunk, num_blocks=blocks)) as engine:
        found = run_all(engine, prompts, limit)
        assert engine.metrics.live_fixed_bytes == 0
    assert found == alone(prompts, limit)


@pytest.mark.parametrize("stage", list(je.Stage))
@pytest.mark.parametrize("error", [je.RetryableStepError("again"), MemoryError("full"), RuntimeError("odd")])
def test_E2_F8_I5_a_dropped_step_leaves_the_states_of_its_rows(stage, error):
    """A fault in the third step, and then in each that follows; the state before it goes on as if nothing had been."""
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    state = begun(MODEL, *prompts, limit=6, config=CONFIG)
    while je.plan_step(state).outcome is je.StepOutcome.COMMITTED:
        before = state
        kept = jax.tree.map(lambda array: np.array(array, copy=True), before.store.fixed)
        with pytest.raises((je.StepError, type(error))), je.inject_fault(stage, error):
            je.commit(state, je.execute(MODEL, state, je.plan_step(state)), donate=False)
        assert all((np.array(a) == b).all() for a, b in zip(before.store.fixed, kept, strict=True))
        state, _ = je.step(MODEL, state)
    assert sequences(state) == alone(prompts, 6)


def sequences(state):
    return [tokens_of(state, request_id) for request_id in state.control.requests.id.tolist()]


@settings(max_examples=10)
@given(prompts=st.lists(PROMPT, min_size=1, max_size=4), steps=st.integers(1, 6))
def test_E8_I2_a_commit_writes_no_bank_that_its_state_reads(prompts, steps):
    state = begun(MODEL, *prompts, limit=4, config=CONFIG)
    for _ in range(steps):
        requests = state.control.requests
        reads = np.flatnonzero((requests.place >= 0) & (requests.processed > 0))
        slots = requests.place[reads] + requests.bank[reads].astype(int) * CONFIG.max_batch_size
        held = [np.array(pool)[slots] for pool in state.store.fixed]
        state, _ = je.step(MODEL, state)
        assert all(
            (np.array(pool)[slots] == was).all() for pool, was in zip(state.store.fixed, held, strict=True)
        )


def test_I2_turning_the_bank_copies_nothing():
    """The program that commits takes the pools of states over, and writes rows only."""
    state = begun(MODEL, [3, 1], limit=4, config=CONFIG)
    plan = je.plan_step(state)
    bucket = bucket_for(plan, state.control.config)
    batch, store = pack(state.control, plan, bucket), state.store
    result = MODEL.programs.forward(
        MODEL.decoder.params,
        store.pages,
        store.block_table,
        store.fixed,
        batch,
        tile_size=bucket.tile_size,
    )
    to = destinations(state.control, plan, bucket)
    arguments = (store.pages, store.block_table, store.fixed, result.staged, result.fixed, to)
    compiled = MODEL.programs.publish.lower(*arguments).compile()
    held = sum(array.nbytes for array in jax.tree.leaves((store.pages, store.block_table, store.fixed)))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    assert "copy(" not in compiled.as_text()


def test_D4_I1_a_slot_that_was_given_away_refuses_its_former_owners_step():
    state = begun(MODEL, [3, 1], limit=4, config=CONFIG)
    state, _ = je.step(MODEL, state)
    old = je.execute(MODEL, state, je.plan_step(state))
    place = state.control.requests.place[0]
    state = je.close_request(state, 1)
    state, second = je.create_request(state)
    state, _ = je.begin_turn(state, second, [5])
    with pytest.raises(je.StaleTransactionError):
        je.commit(state, old)
    state, _ = je.step(MODEL, state)
    assert state.control.requests.place[0] == place
    assert sequences(state) == alone([[5]], 1)


def test_O1_a_static_batch_refuses_fixed_states():
    static = je.EngineConfig(max_batch_size=2, batching="static")
    with pytest.raises(ValueError, match="fixed states, such as 'window', and a static batch"):
        je.init_state(MODEL, static)


def test_I6_bytes_of_slots_staging_and_residents_are_reported():
    """A window of two numbers and a recurrence of one, in float32, are 12 bytes; a token's keys and values are 32."""
    with je.Engine(MODEL, CONFIG) as engine:
        request = engine.create_request()
        request.begin_turn([1, 2, 3])
        engine.run()
        metrics = engine.metrics
    assert metrics.fixed_bytes == BANKS * 3 * 12
    assert metrics.live_fixed_bytes == 12
    assert metrics.staging_bytes == 16 * 32 + 3 * 12


# Prefixes

CHANNELS, LENGTH = 2, 3
SPECS = (
    FixedSpec("window", (CHANNELS, LENGTH), np.dtype(np.float32)),
    FixedSpec("sum", (CHANNELS,), np.dtype(np.float32)),
)


def weighted(state, present):
    following = 3 * state + present
    return following, 2 * following


def of_one_row(past, values):
    """The window after each token, the recurrence after each, in plain NumPy."""
    window = np.concatenate([past["window"], values.T], axis=1)
    total, totals = past["sum"], [past["sum"]]
    for value in values:
        total = 3 * total + value
        totals.append(total)
    return [window[:, i : i + LENGTH] for i in range(len(values) + 1)], totals


ROWS, TOKENS = 4, 25


@jax.jit
def states_of(pools, batch, values, accepted):
    """What each token sees, and the states after all tokens and after the accepted ones, of both kinds of state."""
    states = RowStates(pools, batch, replayable=True)
    before, (window, window_replay) = states.window(SPECS[0], values)
    outputs, (total, total_replay) = states.scan(SPECS[1], weighted, values)
    then = [after_prefix(batch, replay, accepted) for replay in (window_replay, total_replay)]
    return before, outputs, [window, then[0]], [total, then[1]]


@settings(max_examples=60)
@given(
    data=st.data(),
    counts=st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS),
    owned=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    slots=st.permutations(range(BANKS * ROWS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_I4_the_state_after_an_accepted_prefix_is_that_of_the_prefix_alone(data, counts, owned, slots, seed):
    """Rows of any length, in slots that lie in a run or anywhere; whole numbers, so that sums are exact."""
    accepted = [data.draw(st.integers(0, count)) for count in counts]
    rng = np.random.default_rng(seed)
    pools = {spec.name: rng.integers(-9, 9, (BANKS * ROWS, *spec.shape)).astype(np.float32) for spec in SPECS}
    values = rng.integers(-9, 9, (TOKENS, CHANNELS)).astype(np.float32)
    start = np.cumsum([0, *counts[:-1]])
    batch = StateRows(
        start=start.astype(np.int32),
        num_tokens=np.array(counts, np.int32),
        source=np.array(slots[:ROWS], np.int32),
        owned=np.array(owned),
        row_of=np.resize(np.repeat(np.arange(ROWS), counts), TOKENS).astype(np.int32),
    )
    before, outputs, windows, totals = states_of(pools, batch, values, np.array(accepted, np.int32))
    for row, count in enumerate(counts):
        past = {name: pool[slots[row]] * owned[row] for name, pool in pools.items()}
        own = slice(start[row], start[row] + count)
        window_at, total_at = of_one_row(past, values[own])
        np.testing.assert_array_equal(before[own], np.array(window_at[:-1]).reshape(count, CHANNELS, LENGTH))
        np.testing.assert_array_equal(outputs[own], 2 * np.array(total_at[1:]).reshape(count, CHANNELS))
        for nth, length in enumerate((count, accepted[row])):
            np.testing.assert_array_equal(windows[nth][row], window_at[length])
            np.testing.assert_array_equal(totals[nth][row], total_at[length])


# Faults that the toy decoder tells


def _other_slot(states):
    return states._replace(source=np.roll(states.source, 1))


def _other_bank(states):
    rows = CONFIG.max_batch_size
    return states._replace(source=(states.source + rows) % (BANKS * rows))


def _not_owned(states):
    return states._replace(owned=np.zeros_like(states.owned))


def _one_token_less(states):
    return states._replace(num_tokens=np.maximum(states.num_tokens - 1, 0))


def _borders_moved(states):
    return states._replace(start=states.start + 1)


@pytest.mark.parametrize(
    "fault",
    [_other_slot, _other_bank, _not_owned, _one_token_less, _borders_moved],
    ids=lambda fault: fault.__name__,
)
def test_P3_a_wrong_slot_bank_or_border_changes_the_tokens(fault):
    """In the second of two steps of three rows, a fault for each; a state is right by chance once in 28."""

    class Faulty:
        choose = staticmethod(MODEL.programs.choose)
        publish = staticmethod(MODEL.programs.publish)

        def forward(self, params, pages, table, fixed, batch, **static):
            batch = batch._replace(states=fault(batch.states))
            return MODEL.programs.forward(params, pages, table, fixed, batch, **static)

    faulty = dataclasses.replace(MODEL, programs=Faulty())
    rng, changed = np.random.default_rng(0), 0
    for _ in range(20):
        prompts = [rng.integers(0, toy.LETTERS, 9).tolist() for _ in range(3)]
        state = begun(MODEL, *prompts, limit=4, config=dataclasses.replace(CONFIG, chunk_size=5))
        state, _ = je.step(MODEL, state)
        state, _ = je.step(faulty, state)
        while je.plan_step(state).outcome is je.StepOutcome.COMMITTED:
            state, _ = je.step(MODEL, state)
        found, expected = sequences(state), alone(prompts, 4)
        changed += sum(one != other for one, other in zip(found, expected, strict=True))
    assert changed >= 54
