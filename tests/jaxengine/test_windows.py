"""Rings in the engine, with the toy decoder that has a windowed layer, whose tokens plain Python knows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine import toy, transaction
from jaxengine.sizing import resolve_config
from jaxengine.windows import ring_blocks, ring_of
from onnx_import import AttentionSpec
from tests.jaxengine.breaking import FAULTS, play
from tests.jaxengine.harness import begun, finish, tokens_of
from tests.jaxengine.scripts import commands, readable, steps, with_own_store

WINDOW, CHUNK, SIZE, RING = 4, 3, 4, 2
MODEL = toy.toy_model(window=WINDOW)
CONFIG = je.EngineConfig(
    max_batch_size=3,
    max_scheduled_tokens=16,
    num_blocks=16,
    block_size=SIZE,
    chunk_size=CHUNK,
    check_invariants=True,
)
"""Rings of eight slots, and too few blocks for three long requests, so that some are preempted."""
PROMPT = st.lists(st.integers(0, toy.LETTERS - 1), min_size=1, max_size=20)


def shapes(state):
    return [held.shape for held in state.store.pages]


def alone(prompts, limit, window=WINDOW):
    return [[*prompt, *toy.continuation(prompt, limit, window=window)] for prompt in prompts]


def run_all(engine, prompts, limit):
    """Every prompt's tokens and what came of it; a request leaves once it is done, so that places are used again."""
    requests = [engine.create_request() for _ in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        request.begin_turn(prompt, je.TurnOptions(limit))
    found = {}
    while engine.has_pending_requests():
        for event in engine.run():
            if event.request is not None and je.EngineEventFlags.TURN_FINISHED in event.flags:
                found[event.request] = event.request.tokens.tolist()
                event.request.close()
    return [found[request] for request in requests]


# When there are rings


def layers_of(*windows):
    kind = np.dtype(np.float32)
    return tuple(AttentionSpec(i, 1, 1, 4, 1.0, kind, window=window) for i, window in enumerate(windows))


@settings(max_examples=300)
@given(
    windows=st.lists(st.none() | st.integers(1, 80), max_size=4),
    chunk=st.none() | st.integers(1, 40),
    size=st.integers(1, 20),
    longest=st.integers(1, 100),
)
def test_J1_J3_rings_have_the_blocks_of_the_formula_where_they_are_of_use(windows, chunk, size, longest):
    config = dataclasses.replace(CONFIG, chunk_size=chunk, block_size=size)
    rings = ring_blocks(layers_of(*windows), config, longest)
    for window, ring in zip(windows, rings, strict=True):
        if window is None or chunk is None or None not in windows:
            assert ring is None
            continue
        needed = chunk + window - 1
        least = next(blocks for blocks in itertools.count() if blocks * size >= needed)
        whole = next(blocks for blocks in itertools.count() if blocks * size >= longest)
        assert ring == (least if least < whole else None)


def test_J1_J4_pages_of_rings_belong_to_places_and_the_others_to_the_pool():
    assert shapes(je.init_state(MODEL, CONFIG)) == [(16, 2, 1, SIZE, 4), (3, RING, 2, 1, SIZE, 4)]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (MODEL, dataclasses.replace(CONFIG, chunk_size=None)),
        (MODEL, dataclasses.replace(CONFIG, chunk_size=60)),
        (MODEL, je.EngineConfig(max_batch_size=3, chunk_size=CHUNK, batching="static")),
        (toy.toy_model(window=WINDOW, max_length=8), CONFIG),
        (toy.toy_model(), CONFIG),
    ],
    ids=["no chunk size", "no smaller than a table", "static batch", "short sessions", "no window"],
)
def test_J3_O1_where_a_ring_is_of_no_use_every_layer_keeps_whole_sequences(model, config):
    state = je.init_state(model, config)
    assert {ring_of(held) for held in state.store.pages} == {None}
    assert len({held.shape for held in state.store.pages}) == 1


@pytest.mark.slow
def test_J3_a_static_batch_of_windowed_layers_gives_the_same_tokens():
    config = je.EngineConfig(max_batch_size=3, max_scheduled_tokens=16, chunk_size=CHUNK, batching="static")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    with je.Engine(MODEL, config) as engine:
        assert run_all(engine, prompts, 8) == alone(prompts, 8)


@pytest.mark.parametrize(
    ("own", "folder", "expected"), [(None, 5, 5), (7, 5, 7), (None, 0, None), (2, -1, 2)]
)
def test_J2_the_folders_chunk_size_counts_where_the_caller_gave_none(own, folder, expected):
    model = toy.toy_model(window=WINDOW, search={"chunk_size": folder})
    state = je.init_state(model, dataclasses.replace(CONFIG, chunk_size=own))
    assert state.control.config.chunk_size == expected
    assert ring_of(state.store.pages[1]) == (
        None if expected is None else -(-(expected + WINDOW - 1) // SIZE)
    )


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), ("many", TypeError), (True, TypeError)])
def test_J2_a_chunk_size_of_the_folder_that_is_none_is_refused_by_name(value, error):
    model = toy.toy_model(search={"chunk_size": value})
    with pytest.raises(error, match=r"search\.chunk_size of the model folder"):
        je.init_state(model, dataclasses.replace(CONFIG, chunk_size=None))


# The same tokens, whatever happens


@settings(max_examples=25)
@given(prompts=st.lists(PROMPT, min_size=1, max_size=6), limit=st.integers(1, 14))
def test_J4_J5_C11_every_request_has_its_own_ring(prompts, limit):
    """Packed in any company, in rings that others had before, and run again after preemption."""
    with je.Engine(MODEL, CONFIG) as engine:
        assert run_all(engine, prompts, limit) == alone(prompts, limit)
        assert shapes(engine.state) == shapes(je.init_state(MODEL, CONFIG))


def test_J4_C11_preempted_requests_refill_their_rings():
    """Three of 34 tokens need 27 blocks of 16."""
    prompts = [[3, 1, 4] * 6, [5, 9, 2] * 6, [6, 5, 3] * 6]
    with je.Engine(MODEL, CONFIG) as engine:
        assert run_all(engine, prompts, 16) == alone(prompts, 16)
        assert engine.metrics.preemptions


GRID = [
    (4, 3, 4),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(32, 5, 4), (1, 1, 1)]),
    *(
        pytest.param(*sizes, marks=(pytest.mark.slow, pytest.mark.thorough))
        for sizes in [(1, 3, 4), (4, 1, 1)]
    ),
]
"""A common one, and the extremes; with `--thorough` one of the sizes of each extreme beside the common others."""


@pytest.mark.parametrize(("window", "chunk", "size"), GRID)
def test_J1_J5_case_C5_prompts_around_window_chunk_and_ring(window, chunk, size):
    """A token one too many or too few, at the edge of the window or behind a wrap, changes the sum."""
    model = toy.toy_model(window=window)
    ring = -(-(chunk + window - 1) // size)
    around = {n + off for n in (window, chunk, ring * size, 2 * ring * size) for off in (-1, 0, 1)}
    prompts = [[(7 * i + n) % toy.LETTERS for i in range(n)] for n in sorted(around) if 0 < n < 58]
    config = dataclasses.replace(CONFIG, block_size=size, chunk_size=chunk, num_blocks=64 // size)
    with je.Engine(model, config) as engine:
        assert ring_of(engine.state.store.pages[1]) == ring
        limit = toy.CONTEXT - len(prompts[-1])
        assert run_all(engine, prompts, limit) == alone(prompts, limit, window)


@pytest.mark.slow
def test_E4_J4_rings_and_fixed_states_side_by_side():
    """Both belong to the place; three of these requests are cut, and the fourth gets the place of one before it."""
    prompts = [[3, 1, 4] * 5, [1, 5], [9, 2, 6, 5] * 3, [3, 5, 8, 9, 7]]
    with je.Engine(toy.toy_model(hybrid=True, window=WINDOW), CONFIG) as engine:
        assert run_all(engine, prompts, 12) == [
            [*prompt, *toy.continuation(prompt, 12, hybrid=True, window=WINDOW)] for prompt in prompts
        ]


@settings(max_examples=25)
@given(script=commands)
def test_J4_J5_turns_cancellations_and_places_used_again(script):
    """Each greedy token is what plain Python says of its request's sequence, first turn or continuation."""
    for state, plan, answer in steps(script, MODEL, CONFIG):
        after, _ = je.commit(state, je.execute(MODEL, state, plan), donate=False)
        for row in plan.rows:
            if row.samples and state.control.requests.temperature[state_row(state, row)] == 0:
                before = tokens_of(state, row.request_id)
                assert tokens_of(after, row.request_id)[len(before) :] == alone([before], 1)[0][-1:]
        answer.append(after)


def state_row(state, row):
    return int(np.searchsorted(state.control.requests.id, np.uint64(row.request_id)))


def test_F2_E2_a_step_that_fails_at_any_stage_leaves_the_rings():
    """Every stage before the device write, every kind of error, in the step in which the rings wrap."""
    prompts, expected = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]], alone([[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]], 9)
    for stage, kind in FAULTS:
        if stage is not je.Stage.PUBLISH:
            story = play(MODEL, CONFIG, prompts, [(stage, kind, 4)], limit=9)
            assert list(story.tokens.values()) == expected, (stage, kind)


# What a step writes


@settings(max_examples=15)
@given(script=commands)
def test_E8_J1_a_step_writes_no_slot_that_the_state_before_it_reads(script):
    """Of a ring these are the last W - 1 committed positions; a commit that copies shows the store of both."""
    for state, plan, answer in steps(script, MODEL, CONFIG):
        before = readable(state, state, WINDOW)
        after, _ = je.commit(state, je.execute(MODEL, state, plan), donate=False)
        for was, now in zip(before, readable(after, state, WINDOW), strict=True):
            np.testing.assert_array_equal(now, was)
        answer.append(after)


@settings(max_examples=15)
@given(script=commands, poison=st.sampled_from((np.nan, np.inf, 12345.0)))
def test_case_C1_what_a_ring_held_before_changes_no_bit(script, poison):
    for state, _, answer in steps(script, MODEL, CONFIG):
        clean, dirty = (je.execute(MODEL, at, je.plan_step(at)) for at in (state, poisoned(state, poison)))
        if clean.staged is not None:
            for one, other in zip(
                jax.tree.leaves(clean.staged.result), jax.tree.leaves(dirty.staged.result), strict=True
            ):
                np.testing.assert_array_equal(one, other)
        answer.append(je.commit(state, clean)[0])


def poisoned(state: je.EngineState, poison: float) -> je.EngineState:
    """The same state, with `poison` in every slot of the rings that no query sees any more."""
    store, requests = with_own_store(state).store, state.control.requests
    seen = np.zeros((CONFIG.max_batch_size, RING * SIZE), bool)
    for place, processed in zip(requests.place, requests.processed, strict=True):
        if place >= 0:
            seen[place, np.arange(max(0, processed - WINDOW + 1), processed) % (RING * SIZE)] = True
    full, rings = store.pages
    kept = jnp.array(seen.reshape(-1, RING, 1, 1, SIZE, 1))
    rings = jnp.where(kept, rings, jnp.asarray(poison, rings.dtype))
    return state.replace(store=store.replace(pages=(full, rings), lease=type(store.lease)()))


def test_E8_J2_a_row_longer_than_the_ring_allows_is_refused_before_anything_is_written():
    """The ring of 8 slots has room for 5 tokens beside the 3 that the first of them reads; a plan of 6 is no plan."""
    state = begun(MODEL, list(range(20)), config=CONFIG)
    state, _ = je.step(MODEL, state)
    plan = je.plan_step(state)
    assert plan.num_tokens.tolist() == [CHUNK]
    je.execute(MODEL, state, dataclasses.replace(plan, num_tokens=np.array([5])))
    with pytest.raises(je.ContractError, match="a row of 6 tokens would write over what it reads"):
        je.execute(MODEL, state, dataclasses.replace(plan, num_tokens=np.array([6])))
    state, _ = finish(MODEL, state)
    assert tokens_of(state, 1)[:25] == alone([list(range(20))], 5)[0]


def test_E8_rings_made_for_a_smaller_chunk_are_refused_and_would_be_written_over(monkeypatch):
    """A test of the test: what `readable` compares does change under a ring of 4 slots and rows of 3 tokens."""
    small = dataclasses.replace(CONFIG, chunk_size=1, block_size=2)
    state = begun(MODEL, list(range(20)), config=small)
    for _ in range(5):
        state, _ = je.step(MODEL, state)
    larger = state.control.replace(config=dataclasses.replace(state.control.config, chunk_size=CHUNK))
    state = state.replace(control=larger)
    plan = je.plan_step(state)
    with pytest.raises(je.ContractError, match="a row of 3 tokens would write over what it reads"):
        je.execute(MODEL, state, plan)
    monkeypatch.setattr(transaction, "require_room_in_rings", lambda *_: None)
    before = readable(state, state, WINDOW)
    after, _ = je.commit(state, je.execute(MODEL, state, plan), donate=False)
    same = [np.array_equal(*pair) for pair in zip(before, readable(after, state, WINDOW), strict=True)]
    assert same == [True, False, True]


# Sizes


def test_J1_J4_I6_bytes_of_rings_are_apart_from_the_pools():
    """A token's keys and values are 32 bytes a layer."""
    with je.Engine(MODEL, CONFIG) as engine:
        metrics = engine.metrics
    assert metrics.pool_bytes == metrics.pool_tokens * 32 == 16 * SIZE * 32
    assert metrics.window_bytes == 3 * RING * SIZE * 32
    assert metrics.staging_bytes == 16 * 2 * 32
    with je.Engine(toy.toy_model(), CONFIG) as engine:
        assert engine.metrics.window_bytes == 0


@given(free=st.integers(0, 20_000), rows=st.integers(1, 5), chunk=st.integers(1, 70), size=st.integers(1, 9))
def test_D6_rings_of_all_places_are_set_aside_and_the_pool_pays_for_full_layers_only(free, rows, chunk, size):
    config = je.EngineConfig(
        max_batch_size=rows, max_scheduled_tokens=16, block_size=size, chunk_size=chunk, memory_fraction=1.0
    )
    _, ring = ring_blocks(MODEL.decoder.layers, config, toy.CONTEXT)
    columns = -(-toy.CONTEXT // size)
    layers = 2 if ring is None else 1
    aside = 16 * 64 + 4 * rows * columns + rows * (ring or 0) * size * 32

    def fits(blocks):
        return aside + blocks * size * 32 * layers <= free

    if not fits(1):
        with pytest.raises(ValueError, match="too little"):
            resolve_config(MODEL, config, free)
        return
    blocks = resolve_config(MODEL, config, free).num_blocks
    assert fits(blocks)
    assert blocks == rows * columns or not fits(blocks + 1)


def test_D6_a_pool_of_given_size_has_to_fit_beside_its_rings():
    needed = 16 * SIZE * 32 + 4 * 3 * 16 + 3 * RING * SIZE * 32
    assert resolve_config(MODEL, CONFIG, needed).num_blocks == 16
    with pytest.raises(ValueError, match="rings and fixed states"):
        resolve_config(MODEL, CONFIG, needed - 1)


def test_J1_a_request_of_32k_tokens_has_the_ring_of_one_of_1k():
    """The full layer's blocks grow with it. Attention isn't run: what is kept counts here, not what comes of it."""
    model = toy.toy_model(window=1024, context_length=2**15 + 1)
    config = je.EngineConfig(
        max_batch_size=1, max_scheduled_tokens=2048, num_blocks=2**11 + 1, chunk_size=2048
    )

    class Blind:
        """Programs that attend to nothing."""

        publish = staticmethod(model.programs.publish)
        choose = staticmethod(model.programs.choose)

        def forward(self, *given: Any, **static: Any) -> Any:
            run = functools.partial(model.programs.forward, **static)
            return jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), jax.eval_shape(run, *given))

    with je.Engine(dataclasses.replace(model, programs=Blind()), config) as engine:
        before, sizes = shapes(engine.state), []
        for length in (2**10, 2**15):
            request = engine.create_request()
            request.begin_turn([1] * length, je.TurnOptions(1))
            while engine.has_pending_requests():
                engine.run()
                assert shapes(engine.state) == before
            metrics = engine.metrics
            sizes.append((metrics.window_bytes, metrics.num_blocks - metrics.free_blocks))
            request.close()
    ring_bytes = 192 * 16 * 32
    assert sizes == [(ring_bytes, 2**10 // 16), (ring_bytes, 2**15 // 16)]
