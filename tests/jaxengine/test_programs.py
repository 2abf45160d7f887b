"""The compiled programs: no copy of the pool, few shapes, no retracing, and every token to its own slot."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.programs import Bucket, Programs, bucket_for, destinations, pack
from jaxengine.toy import ToyDecoder, toy_model
from tests.jaxengine.harness import SMALL
from tests.jaxengine.scripts import GREEDY, MODEL, SAMPLED, begin, commands, steps

LLAMA = Path(__file__).parents[1] / "fixtures" / "models" / "cpu-fp32" / "llama"
ROOMY = je.EngineConfig(max_batch_size=2, max_scheduled_tokens=16, num_blocks=3001, block_size=16)
"""A layer of this pool is larger than anything else that a step of the tiny model touches."""

_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\S+)\[([\d,]*)\]\S* ([\w\-]+)\(", re.MULTILINE)
MOVES_NOTHING = {"parameter", "bitcast", "get-tuple-element", "tuple", "while", "call", "conditional"}


@pytest.fixture(scope="module")
def roomy() -> tuple[je.Model, je.EngineState]:
    """A model with a state whose pool is large, and a prefill queued."""
    model = je.load_model(LLAMA)
    return model, begin(je.init_state(model, ROOMY), [5, 6, 7])[0]


def lowered(model: je.Model, state: je.EngineState) -> tuple[Any, Any]:
    """The compiled forward and publish programs of the state's next step."""
    plan = je.plan_step(state)
    bucket = bucket_for(plan, state.control.config)
    batch, store = pack(state.control, plan, bucket), state.store
    arguments = (model.decoder.params, store.pages, store.block_table, store.fixed, batch)
    forward = model.programs.forward.lower(*arguments, tile_size=bucket.tile_size)
    result = jax.eval_shape(
        lambda *args: model.programs.forward(*args, tile_size=bucket.tile_size), *arguments
    )
    to = destinations(state.control, plan, bucket)
    return forward.compile(), model.programs.publish.lower(
        store.pages, store.block_table, store.fixed, result.staged, result.fixed, to
    ).compile()


def large_results(text: str, elements: int) -> set[str]:
    """Operations of a compiled module that make an array of at least `elements` elements."""
    found = set()
    for _, shape, operation in _RESULT.findall(text):
        if math.prod(int(size) for size in shape.split(",") if size) >= elements:
            found.add(operation)
    return found - MOVES_NOTHING


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_E1_no_program_copies_the_pool(roomy, phase):
    """The forward pass makes nothing as large as a layer's pages; the commit writes them where they are."""
    model, state = roomy
    if phase == "decode":
        state, _ = je.commit(state, je.execute(model, state, je.plan_step(state)), donate=False)
    forward, publish = lowered(model, state)
    pages = state.store.pages
    assert large_results("  %p = f32[9,9]{1,0} copy(%q)", 81) == {"copy"}
    assert large_results(forward.as_text(), pages[0].size) == set()
    written = large_results(publish.as_text(), pages[0].size)
    assert written
    assert not {
        name for name in written if re.search("copy|transpose|convert|broadcast|concatenate", name)
    }, written
    memory = publish.memory_analysis()
    assert memory.alias_size_in_bytes == sum(page.nbytes for page in pages) + state.store.block_table.nbytes
    assert memory.temp_size_in_bytes < pages[0].nbytes
    assert forward.memory_analysis().alias_size_in_bytes == 0
    assert forward.memory_analysis().temp_size_in_bytes < pages[0].nbytes


def test_E1_the_copying_commit_is_told_apart(roomy):
    """The same measures see the form that copies: nothing aliased, and the pool once more as output."""
    model, state = roomy
    plan = je.plan_step(state)
    to = destinations(state.control, plan, bucket_for(plan, state.control.config))
    transaction = je.execute(model, state, plan)
    assert transaction.staged is not None
    store = state.store
    copying = model.programs.publish_copy.lower(
        store.pages, store.block_table, store.fixed, transaction.staged.result.staged, (), to
    )
    compiled = copying.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert "copy" in large_results(compiled.as_text(), store.pages[0].size)


def test_E1_J1_no_program_copies_the_rings():
    """Those of a wide window are larger than the pool and than anything that a step makes."""
    model = toy_model(window=2000, context_length=4096)
    config = dataclasses.replace(SMALL, chunk_size=16)
    state, _ = begin(je.init_state(model, config), [5, 6, 7])
    full, rings = state.store.pages
    assert rings.size > 10 * full.size
    forward, publish = lowered(model, state)
    assert large_results(forward.as_text(), rings.size) == set()
    written = large_results(publish.as_text(), rings.size)
    assert written
    assert not {name for name in written if re.search("copy|transpose|convert|broadcast", name)}, written
    held = full.nbytes + rings.nbytes + state.store.block_table.nbytes
    assert publish.memory_analysis().alias_size_in_bytes == held


# Shapes


@dataclasses.dataclass(frozen=True, eq=False)
class CountingDecoder:
    """The toy decoder, counting how often its forward pass is traced, and for which shapes."""

    toy: ToyDecoder
    traced: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.toy, name)

    def apply(self, params: Any, tokens: Any, *others: Any) -> Any:
        self.traced.append((len(tokens), len(others[2])))
        return self.toy.apply(params, tokens, *others)


@pytest.fixture
def counted() -> tuple[je.Model, list[tuple[int, int]]]:
    """A toy model with programs of its own, and the list of its traces."""
    decoder = CountingDecoder(MODEL.decoder)
    return dataclasses.replace(MODEL, decoder=decoder, programs=Programs(decoder)), decoder.traced


def every_compilation() -> Iterator[list[str]]:
    """A list that grows by one with each function that JAX traces or compiles anywhere."""
    seen: list[str] = []
    active = [True]

    def listen(event: str, duration: float, **extra: Any) -> None:
        if active[0] and event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    active[0] = False


compilations = pytest.fixture(every_compilation)


def test_few_programs_one_trace_a_bucket_and_none_for_a_change_of_members(counted, compilations):
    """Requests that come, leave, cancel, continue, sample or are greedy run through the programs that are there."""
    model, traced = counted
    state = je.init_state(model, SMALL)

    def serve_some(state: je.EngineState, seed: int) -> tuple[je.EngineState, set[Bucket]]:
        rng = np.random.default_rng(seed)
        buckets = set()
        for _ in range(25):
            ids = state.control.requests.id.tolist()
            if len(ids) < 4:
                sampling = SAMPLED if rng.random() < 0.5 else GREEDY
                state, _ = begin(
                    state,
                    rng.integers(0, 28, rng.integers(1, 12)),
                    most=int(rng.integers(1, 9)),
                    sampling=sampling,
                )
            if ids and rng.random() < 0.2:
                state = je.close_request(state, int(rng.choice(ids)))
            for request_id, status in zip(
                state.control.requests.id, state.control.requests.status, strict=True
            ):
                if status == je.RequestStatus.TURN_COMPLETE:
                    state = je.close_request(state, int(request_id))
            plan = je.plan_step(state)
            if plan.outcome is je.StepOutcome.COMMITTED:
                buckets.add(bucket_for(plan, SMALL))
                state, _ = je.commit(state, je.execute(model, state, plan))
            state, _ = je.drain(state, 100)
        return state, buckets

    state, buckets = serve_some(state, 0)
    assert sorted(traced) == sorted((bucket.tokens, bucket.rows) for bucket in buckets)
    assert len(buckets) == 4
    compilations.clear()
    state, again = serve_some(state, 1)
    assert len(again) > 1
    assert again <= buckets
    assert compilations == []


@settings(max_examples=30)
@given(script=commands)
def test_bucket_for_picks_the_smallest_shape_that_holds_the_plan(script):
    for state, plan, answer in steps(script):
        if plan.total_tokens:
            check_bucket(state, plan)
        answer.append(je.step(MODEL, state)[0])


def check_bucket(state: je.EngineState, plan: je.StepPlan) -> None:
    bucket = bucket_for(plan, SMALL)
    decode = not any(row.is_prefill for row in plan.rows)
    need = max(len(plan.rows), 2) if decode else max(plan.total_tokens, 16)
    assert bucket.tokens == 2 ** math.ceil(math.log2(need))
    assert bucket.rows == (bucket.tokens if decode else 4)
    tiles = pack(state.control, plan, bucket).tiles
    assert len(tiles.num_queries) == bucket.tiles
    assert int(tiles.num_queries.sum()) == plan.total_tokens


def test_decode_buckets_hold_every_batch_size_in_few_shapes():
    state = je.init_state(
        MODEL, dataclasses.replace(SMALL, max_batch_size=13, max_scheduled_tokens=64, num_blocks=64)
    )
    shapes = set()
    for _ in range(13):
        state, _ = begin(state, [1], most=40)
        state, _ = je.step(MODEL, state)
        plan = je.plan_step(state)
        assert not plan.is_prefill.any()
        shapes.add(bucket_for(plan, state.control.config).tokens)
    assert shapes == {2, 4, 8, 16}


# Packing


@settings(max_examples=30)
@given(script=commands)
def test_C7_packing_and_destinations_equal_a_plain_loop(script):
    """G1: rows lie one behind the other at absolute positions; each token goes to the slot its position names."""
    for state, plan, answer in steps(script):
        if plan.total_tokens:
            check_packing(state, plan)
        answer.append(je.step(MODEL, state)[0])


def check_packing(state: je.EngineState, plan: je.StepPlan) -> None:
    control, config = state.control, state.control.config
    bucket = bucket_for(plan, config)
    batch, to = pack(control, plan, bucket), destinations(control, plan, bucket)
    expected, last = [], []
    for nth, row in enumerate(plan.rows):
        (index,) = np.flatnonzero(control.requests.id == row.request_id)
        sequence = control.tokens.read(int(index), 0, int(control.requests.length[index]))
        table = [*control.blocks.read(int(index), 0, int(control.blocks_held[index])), *row.block_ids]
        start = int(control.requests.processed[index])
        assert row.packed_token_offset == len(expected)
        for position in range(start, start + row.num_tokens):
            column, slot = divmod(position, config.block_size)
            expected.append((sequence[position], position, plan.places[nth], column, table[column], slot))
        last.append(len(expected) - 1)
        assert row.logits_row_index == last[-1]
    count = len(expected)
    columns = (batch.tokens, batch.positions, to.place, to.column, to.block, to.slot)
    assert list(zip(*(column[:count] for column in columns), strict=True)) == expected
    assert batch.logits_rows[: len(last)].tolist() == last
    assert (to.block[count:] >= config.num_blocks).all()
    assert (to.place[count:] >= config.max_batch_size).all()
    assert all(len(column) == bucket.tokens for column in columns)
