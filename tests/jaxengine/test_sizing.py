"""How large the pool is: as asked for if that fits, else a share of the free memory and no more than is of use (D6)."""

import dataclasses
import logging

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

import jaxengine as je
from jaxengine import sizing, state
from jaxengine.sizing import free_memory, kv_bytes_per_token, resolve_config
from jaxengine.toy import continuation, toy_model
from onnx_import import AttentionSpec
from tests.jaxengine.harness import SMALL

MODEL = toy_model()
OPEN = dataclasses.replace(SMALL, num_blocks=None)

STATIC = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, batching="static")
LIMITS = {
    "max_batch_size": st.integers(1, 100),
    "max_scheduled_tokens": st.integers(1, 5000),
    "memory_fraction": st.none() | st.floats(0, 1),
}
CONFIGS = st.builds(je.EngineConfig, block_size=st.integers(1, 200), **LIMITS) | st.builds(
    je.EngineConfig, batching=st.just("static"), **LIMITS
)
FREE = st.integers(0, 2**20) | st.integers(0, 2**42)


def model_with(*shapes, max_length=64):
    """A model of attention layers of these head counts, head sizes and dtypes."""
    layers = tuple(
        AttentionSpec(layer=i, num_heads=heads, num_kv_heads=heads, head_dim=size, scale=1.0, kv_dtype=dtype)
        for i, (heads, size, dtype) in enumerate(shapes)
    )
    model = toy_model(context_length=max_length)
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, layers=layers))


DTYPES = st.sampled_from([jax.numpy.dtype("float32"), jax.numpy.dtype("bfloat16")])
MODELS = st.builds(
    lambda shapes, max_length: model_with(*shapes, max_length=max_length),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 64), DTYPES), min_size=1, max_size=5),
    st.integers(1, 3000),
)


def bytes_by_hand(model, tokens):
    """Keys and values, a layer at a time."""
    return sum(
        tokens * 2 * layer.num_kv_heads * layer.head_dim * layer.kv_dtype.itemsize
        for layer in model.decoder.layers
    )


@given(model=MODELS, config=CONFIGS, free=FREE)
def test_D6_pool_and_staging_fit_the_share_and_no_block_is_of_no_use(model, config, free):
    """It is refused exactly where not even the smallest pool would fit."""
    fraction = sizing.HOST_FRACTION if config.memory_fraction is None else config.memory_fraction
    longest = model.config.max_length
    size = longest if config.batching == "static" else config.block_size
    a_row = -(-longest // size)
    aside = bytes_by_hand(model, config.max_scheduled_tokens) + 4 * config.max_batch_size * a_row
    least = config.max_batch_size if config.batching == "static" else 1

    def fits(blocks):
        return bytes_by_hand(model, blocks * size) + aside <= free * fraction

    if not fits(least):
        with pytest.raises(ValueError, match="too little for a KV cache"):
            resolve_config(model, config, free)
        return
    resolved = resolve_config(model, config, free)
    blocks = resolved.num_blocks
    batching = config.batching or "dynamic"
    assert resolved == dataclasses.replace(config, num_blocks=blocks, block_size=size, batching=batching)
    assert fits(blocks)
    assert least <= blocks <= config.max_batch_size * a_row
    assert blocks == config.max_batch_size * a_row or not fits(blocks + 1)


@given(config=CONFIGS, small=FREE, large=FREE)
def test_D6_more_memory_never_makes_a_smaller_pool(config, small, large):
    def blocks(free):
        try:
            return resolve_config(MODEL, config, free).num_blocks
        except ValueError:
            return 0

    small, large = sorted((small, large))
    assert blocks(small) <= blocks(large)


def test_D6_a_fraction_of_nothing_is_refused_and_a_fraction_of_all_takes_all():
    nothing = dataclasses.replace(OPEN, memory_fraction=0)
    with pytest.raises(ValueError, match=r"0\.0 of 1024\.0 MiB of free memory, .* use a larger EngineConfig"):
        resolve_config(MODEL, nothing, 2**30)
    everything = dataclasses.replace(OPEN, memory_fraction=1)
    aside = bytes_by_hand(MODEL, OPEN.max_scheduled_tokens) + 4 * OPEN.max_batch_size * 16
    for blocks in (1, 7):
        free = aside + bytes_by_hand(MODEL, blocks * OPEN.block_size)
        assert resolve_config(MODEL, everything, free).num_blocks == blocks
        assert resolve_config(MODEL, everything, free + 1).num_blocks == blocks
    with pytest.raises(ValueError, match="too little"):
        resolve_config(MODEL, everything, aside + bytes_by_hand(MODEL, OPEN.block_size) - 1)


def test_D6_a_pool_is_never_beyond_32_bit_slots():
    model = model_with((1, 1, jax.numpy.dtype("float32")), max_length=2**20)
    config = je.EngineConfig(max_batch_size=2**14, block_size=48)
    resolved = resolve_config(model, config, 2**60)
    assert resolved.num_blocks == (2**31 - 1) // 48
    with pytest.raises(ValueError, match="too little"):
        resolve_config(model, je.EngineConfig(max_batch_size=2**14, batching="static"), 2**60)


@given(free=FREE, blocks=st.integers(1, 2000))
def test_D6_a_pool_of_given_size_is_taken_as_it_is_or_refused_with_both_sizes(free, blocks):
    config = dataclasses.replace(SMALL, num_blocks=blocks, memory_fraction=0.0, batching="dynamic")
    needed = bytes_by_hand(MODEL, blocks * SMALL.block_size) + 4 * SMALL.max_batch_size * min(16, blocks)
    if needed <= free:
        assert resolve_config(MODEL, config, free) == config
        return
    words = (
        rf"of {blocks} blocks of 4 tokens takes {needed / 2**20:.1f} MiB .* {free / 2**20:.1f} MiB are free"
    )
    with pytest.raises(ValueError, match=words):
        resolve_config(MODEL, config, free)


@pytest.mark.parametrize(
    "config",
    [
        je.EngineConfig(num_blocks=2**31 // 16 - 1),
        je.EngineConfig(max_batch_size=2**31 - 1, num_blocks=4),
        je.EngineConfig(max_batch_size=2**31 - 1),
        je.EngineConfig(max_scheduled_tokens=2**31 - 1),
    ],
)
def test_D6_T2_limits_too_large_for_memory_are_refused_before_anything_is_allocated(monkeypatch, config):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 2**34)
    monkeypatch.setattr(state.jnp, "zeros", None)
    for make in (je.init_state, je.Engine):
        with pytest.raises(ValueError, match=r"KV cache .*; use a (smaller|larger) EngineConfig\."):
            make(MODEL, config)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")],
)
def test_D6_T2_memory_that_runs_out_all_the_same_is_one_sentence(monkeypatch, error):
    def zeros(*_arguments):
        raise error

    monkeypatch.setattr(state.jnp, "zeros", zeros)
    with pytest.raises(
        ValueError, match="memory ran out while a KV cache of 16 blocks of 4 tokens was made; use"
    ):
        je.Engine(MODEL, SMALL)


def test_D6_another_error_of_the_device_stays_what_it_is(monkeypatch):
    def zeros(*_arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(state.jnp, "zeros", zeros)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        je.Engine(MODEL, SMALL)


@pytest.mark.parametrize("config", [SMALL, OPEN, STATIC])
def test_D6_the_size_is_logged_and_in_the_metrics_with_its_tokens(caplog, config):
    with caplog.at_level(logging.INFO, logger="jaxengine"), je.Engine(MODEL, config) as engine:
        metrics = engine.metrics
    size = MODEL.config.max_length if config.batching == "static" else config.block_size
    assert metrics.pool_tokens == metrics.num_blocks * size
    assert metrics.free_blocks == metrics.num_blocks
    assert metrics.pool_bytes == bytes_by_hand(MODEL, metrics.pool_tokens)
    (record,) = [record for record in caplog.records if "KV pool" in record.message]
    mib = metrics.pool_bytes / 2**20
    assert record.message == f"KV pool: {metrics.num_blocks} blocks of {size} tokens, {mib:.1f} MiB"


def test_D6_an_engine_of_no_stated_size_asks_the_device_and_serves_a_full_batch():
    with je.Engine(MODEL, OPEN) as engine:
        assert engine.metrics.num_blocks == OPEN.max_batch_size * 16
        requests = [engine.create_request() for _ in range(OPEN.max_batch_size)]
        for request in requests:
            request.begin_turn([request.id] * 62)
        while engine.has_pending_requests():
            engine.run()
        for request in requests:
            prompt = [request.id] * 62
            assert request.tokens.tolist() == prompt + continuation(prompt, 2)
        assert engine.metrics.preemptions == 0


def test_D6_free_memory_is_what_the_device_has_left_and_on_a_host_what_is_available(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123}))
    assert free_memory(Device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert free_memory(Device(None)) == free_memory(Device({"bytes_in_use": 30})) == 123


def test_D6_accelerators_are_for_the_engine_and_a_host_is_shared(monkeypatch):
    free = 4 * bytes_by_hand(MODEL, OPEN.max_scheduled_tokens + 64)
    blocks = {}
    for platform in ("cpu", "gpu"):
        device = type("Device", (), {"platform": platform, "memory_stats": lambda self: None})()
        monkeypatch.setattr(sizing.jax, "devices", lambda device=device: [device])
        blocks[platform] = resolve_config(MODEL, OPEN, free).num_blocks
        shares = {"cpu": sizing.HOST_FRACTION, "gpu": sizing.ACCELERATOR_FRACTION}
        given_share = dataclasses.replace(OPEN, memory_fraction=shares[platform])
        assert resolve_config(MODEL, given_share, free).num_blocks == blocks[platform]
    assert blocks["cpu"] < blocks["gpu"]
    assert kv_bytes_per_token(MODEL) == bytes_by_hand(MODEL, 1)
