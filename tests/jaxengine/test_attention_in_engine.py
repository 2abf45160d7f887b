"""Attention as the engine drives it: the same bits for every head geometry, no read or write outside a row's slots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine.programs import Programs
from onnx_import import AttentionSpec, FolderConfig
from tests.jaxengine.scripts import MODEL, commands, readable, steps, with_own_store
from tests.jaxengine.serving import differences, serve
from tests.pallas_kernels.ragged import HOLES

VOCAB = 64
CROWDED = je.EngineConfig(max_batch_size=4, num_blocks=90, block_size=7, max_scheduled_tokens=16)
ALONE = dataclasses.replace(CROWDED, max_scheduled_tokens=256)


@dataclasses.dataclass(frozen=True, eq=False)
class TableDecoder:
    """One attention layer over table look-ups; its logits are attention's output and nothing else."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int
    params: dict[str, Any]
    identity: str = "table"
    fixed: tuple[()] = ()

    def apply(self, params, tokens, positions, attention, logits_rows, fixed, limits):
        query, key, value = (
            params[name][tokens % VOCAB] * params["position"][positions][:, None, None]
            for name in ("query", "key", "value")
        )
        output, staged = attention(self.layers[0], query, key, value, params.get("sinks"))
        return output[logits_rows].reshape(len(logits_rows), -1), (staged,)


def table_model(
    group: int, num_kv_heads: int, head_dim: int, *, sinks: bool = False, **extras: Any
) -> je.Model:
    """A model of one attention layer; `extras` are fields of its spec."""
    rng = np.random.default_rng(5)
    heads = {"query": group * num_kv_heads, "key": num_kv_heads, "value": num_kv_heads}
    params = {
        name: jnp.array(rng.standard_normal((VOCAB, count, head_dim)).astype(np.float32))
        for name, count in heads.items()
    }
    params["position"] = jnp.array(rng.uniform(0.5, 1.5, 512).astype(np.float32))
    if sinks:
        params["sinks"] = jnp.array(rng.normal(0, 3, heads["query"]).astype(np.float32))
    kind = np.dtype(np.float32)
    spec = AttentionSpec(0, heads["query"], num_kv_heads, head_dim, head_dim**-0.5, kind, **extras)
    width = heads["query"] * head_dim
    decoder = TableDecoder((spec,), width, params)
    config = FolderConfig(
        model_type="table",
        vocab_size=width,
        context_length=512,
        max_length=512,
        eos_token_ids=(),
        bos_token_id=None,
        pad_token_id=None,
        search={},
        notes=(),
    )
    return je.Model(decoder=decoder, config=config, path=Path("table"), programs=Programs(decoder))


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim"),
    [(1, 1, 64), (1, 2, 80), (2, 1, 32), (2, 1, 256), (3, 1, 64), (4, 2, 16), (7, 1, 64)],
)
def test_E6_logits_are_those_of_the_request_alone_for_every_grouping(group, num_kv_heads, head_dim):
    compare_with_alone(table_model(group, num_kv_heads, head_dim), group)


@pytest.mark.parametrize(
    "extras", [{"window": 5}, {"window": 130, "softcap": 2.0, "sinks": True}], ids=["window", "all"]
)
def test_E6_J5_case_C5_windowed_layers_keep_a_requests_bits(extras):
    """Chunks of 16 in blocks of 7, prefill beside decode: a windowed layer's walk begins elsewhere in every step."""
    model = table_model(3, 1, 64, **extras)
    compare_with_alone(model, 3)
    plain = serve(table_model(3, 1, 64), ALONE, [np.arange(140) % VOCAB], most=1)
    windowed = serve(model, ALONE, [np.arange(140) % VOCAB], most=1)
    assert differences(plain, windowed)


def compare_with_alone(model: je.Model, seed: int) -> None:
    """Serves four prompts together and fails where a bit differs from the prompt served alone in one chunk."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, length) for length in (1, 3, 14, 250)]
    together = serve(model, CROWDED, prompts, most=8, arrivals=[9, 0, 4, 2])
    for i, prompt in enumerate(prompts):
        alone = serve(model, ALONE, [prompt], most=8)
        mine = {(0, length): row for (nth, length), row in together.logits.items() if nth == i}
        found = differences(dataclasses.replace(together, logits=mine), alone)
        assert not found, "; ".join(found)


def poisoned(state: je.EngineState, seed: int, poison: float) -> je.EngineState:
    """The same state, with `poison` in every slot and noise in every table entry that its control value cannot read."""
    rng = np.random.default_rng(seed)
    control, store = state.control, with_own_store(state).store
    size, blocks = control.config.block_size, control.config.num_blocks
    held = np.zeros((blocks, size), bool)
    table = np.array(store.block_table, copy=True)
    noise = rng.choice((*HOLES, blocks, 0, blocks - 1), table.shape).astype(np.int32)
    committed = np.zeros(table.shape, bool)
    for row in range(len(control.requests)):
        processed = int(control.requests.processed[row])
        columns = -(-processed // size)
        for column, block in enumerate(control.blocks.read(row, 0, columns)):
            held[block, : processed - column * size] = True
        if control.requests.place[row] >= 0:
            committed[control.requests.place[row], :columns] = True
    pages = tuple(
        jnp.where(held[:, None, None, :, None], page, jnp.asarray(poison, page.dtype)) for page in store.pages
    )
    table = jnp.array(np.where(committed, table, noise))
    return state.replace(store=store.replace(pages=pages, block_table=table, lease=type(store.lease)()))


@settings(max_examples=25)
@given(script=commands, seed=st.integers(0, 999), poison=st.sampled_from((np.nan, np.inf, 12345.0)))
def test_case_C1_what_a_state_cannot_read_changes_no_bit(script, seed, poison):
    """Stale slots, free blocks, block 0, the last block; table entries that are -1, past the pool or another's."""
    for state, plan, answer in steps(script):
        dirty = poisoned(state, seed, poison)
        clean_step = je.execute(MODEL, state, plan)
        dirty_step = je.execute(MODEL, dirty, je.plan_step(dirty))
        if clean_step.staged is not None:
            for one, other in zip(
                jax.tree.leaves(clean_step.staged.result),
                jax.tree.leaves(dirty_step.staged.result),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)
        clean, _ = je.commit(state, clean_step, donate=False)
        dirty, _ = je.commit(dirty, dirty_step, donate=False)
        for one, other in zip(readable(clean, clean), readable(dirty, clean), strict=True):
            np.testing.assert_array_equal(one, other)
        answer.append(clean)


@settings(max_examples=25)
@given(script=commands, seed=st.integers(0, 999))
def test_case_C1_a_step_writes_its_own_slots_only(script, seed):
    """Every other byte of the pool and of the table, poison included, is the same after the commit."""
    for state, plan, answer in steps(script):
        dirty = poisoned(state, seed, np.nan)
        before = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(dirty.store)]
        new, _ = je.commit(dirty, je.execute(MODEL, dirty, je.plan_step(dirty)), donate=False)
        after = [np.array(leaf, copy=True) for leaf in jax.tree.leaves(new.store)]
        size = state.control.config.block_size
        mine = np.zeros((len(before[0]), size), bool)
        entries = np.zeros(before[-1].shape, bool)
        for row in plan.rows:
            (index,) = np.flatnonzero(new.control.requests.id == row.request_id)
            processed = int(new.control.requests.processed[index])
            positions = np.arange(processed - row.num_tokens, processed)
            blocks = new.control.blocks.read(int(index), 0, -(-processed // size))
            mine[blocks[positions // size], positions % size] = True
            entries[new.control.requests.place[index], positions // size] = True
        assert mine.sum() == plan.total_tokens
        for one, other in zip(before[:-1], after[:-1], strict=True):
            np.testing.assert_array_equal(one.swapaxes(1, 3)[~mine], other.swapaxes(1, 3)[~mine])
        np.testing.assert_array_equal(before[-1][~entries], after[-1][~entries])
        answer.append(new)
