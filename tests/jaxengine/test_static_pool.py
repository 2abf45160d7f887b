"""The cache of a static batch: as many rows as the batch, each as long as the longest session."""

import dataclasses

import numpy as np
import pytest

import jaxengine as je
from jaxengine.metrics import metrics_of
from jaxengine.sizing import resolve_config
from jaxengine.state import replace_rows
from jaxengine.toy import CONTEXT, toy_model
from tests.jaxengine.harness import begun
from tests.jaxengine.holding import MODEL, STATIC, Held, begin, runs


def test_O1_the_cache_is_contiguous_and_its_rows_are_the_batchs():
    engine = Held()
    for _ in range(2):
        begin(engine, [1], [2], [3])
        runs(engine)
        control, store = engine.state.control, engine.state.store
        residents = np.flatnonzero(control.requests.place >= 0)
        tables = [control.blocks.read(row, 0, int(control.blocks_held[row])) for row in residents]
        assert np.array(tables).tolist() == [[0], [1], [2]]
        assert control.requests.place[residents].tolist() == [0, 1, 2]
        assert np.array(store.block_table).tolist() == [[0], [1], [2]]
        assert [pages.shape[0] for pages in store.pages] == [3]
        assert control.config.block_size == CONTEXT


def test_O1_D6_options_that_a_static_batch_cannot_honour_are_refused():
    for name, value in [("num_blocks", 3), ("num_blocks", 64), ("block_size", 32), ("block_size", CONTEXT)]:
        config = dataclasses.replace(STATIC, **{name: value})
        with pytest.raises(ValueError, match=f"EngineConfig.{name} is {value}, but .* one block a request"):
            Held(config)


def test_O1_D6_the_pool_of_a_static_batch_is_its_rows_times_the_longest_session():
    short = toy_model(max_length=20)
    state = je.init_state(short, STATIC)
    metrics = metrics_of(state)
    assert (metrics.num_blocks, metrics.pool_tokens) == (3, 60)
    assert resolve_config(short, state.control.config) == state.control.config


def test_O1_D6_a_static_batch_that_does_not_fit_the_memory_is_refused():
    """32 bytes a token, 16 tokens of staging and 3 table entries: 3 rows of 64 tokens need 6668 bytes."""
    config = dataclasses.replace(STATIC, memory_fraction=0.5)
    assert resolve_config(MODEL, config, free_bytes=2 * 6668).num_blocks == 3
    with pytest.raises(ValueError, match="is too little for a KV cache"):
        resolve_config(MODEL, config, free_bytes=2 * 6668 - 2)


def running():
    """Requests 1 and 3 of a batch of three, of which 2 was closed, and request 4, which waits."""
    state = begun(MODEL, [1], [2], [3], [4], limit=5, config=STATIC)
    state, _ = je.step(MODEL, state)
    return je.close_request(state, 2)


def changed(state, row, **values):
    return state.replace(control=replace_rows(state.control, row, **values))


def with_free(state, free):
    return state.replace(control=state.control.replace(free_blocks=np.array(free, np.int32)))


BROKEN = {
    "a member that came later": (lambda s: changed(s, 1, admitted=7), "request 1: it joined a static batch"),
    "a member's block is free": (lambda s: with_free(s, [0]), "block 0 has 2 owners"),
    "a block lost after the batch": (
        lambda s: with_free(je.close_request(je.close_request(s, 1), 3), [0, 1]),
        "block 2 has 0 owners",
    ),
}


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN)
def test_O1_P1_broken_rules_of_a_static_batch_are_named(broken, words):
    state = running()
    je.check_invariants(state)
    with pytest.raises(je.InvariantViolation, match=words):
        je.check_invariants(broken(state))


@pytest.mark.parametrize("asks", [False, True])
def test_O1_the_folder_decides_where_the_configuration_is_silent(asks):
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, static_batching=asks))
    chosen = {
        given: je.init_state(model, dataclasses.replace(STATIC, batching=given)).control.config.batching
        for given in (None, "static", "dynamic")
    }
    assert chosen == {None: "static" if asks else "dynamic", "static": "static", "dynamic": "dynamic"}
