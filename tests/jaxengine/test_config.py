"""Settings are checked when they are made, say which one is wrong, and are frozen from then on (A1, A5, C2, K4)."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import jaxengine as je
from jaxengine.sampling_params import resolve_sampling

SIZES = ["max_batch_size", "max_scheduled_tokens", "num_blocks", "block_size", "chunk_size", "fairness_bound"]
COUNTS = [
    (je.EngineConfig, "max_row_retries"),
    (je.SamplingParams, "top_k"),
    (je.SamplingParams, "seed"),
    (je.RequestOptions, "max_session_tokens"),
    (je.TurnOptions, "max_generated_tokens"),
]
REQUIRED = [name for name in SIZES if name not in ("chunk_size", "num_blocks")] + ["max_row_retries"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63])
def test_C2_sizes_are_positive_and_fit_31_bits(name, value):
    with pytest.raises(ValueError, match=f"EngineConfig.{name} is {value}; give a value from 1"):
        je.EngineConfig(**{name: value})


@pytest.mark.parametrize(("options", "name"), COUNTS)
@pytest.mark.parametrize("value", [-1, 2**63])
def test_K4_A5_counts_are_not_negative(options, name, value):
    with pytest.raises(ValueError, match=f"{options.__name__}.{name} is {value}; give a value from 0"):
        options(**{name: value})
    assert getattr(options(**{name: 0}), name) == 0


@pytest.mark.parametrize(("options", "name"), COUNTS + [(je.EngineConfig, name) for name in SIZES])
@pytest.mark.parametrize("value", [1.0, True, "1", [1], np.float32(1), np.bool_(True)])
def test_A5_what_is_no_integer_is_refused_by_name(options, name, value):
    with pytest.raises(TypeError, match=f"{options.__name__}.{name} is .*; give an integer"):
        options(**{name: value})


@pytest.mark.parametrize("name", REQUIRED)
def test_C2_sizes_have_no_none(name):
    with pytest.raises(TypeError, match=f"EngineConfig.{name} is None; give an integer"):
        je.EngineConfig(**{name: None})
    for optional in ("chunk_size", "num_blocks", "memory_fraction"):
        assert getattr(je.EngineConfig(**{optional: None}), optional) is None


def test_D6_a_pool_beyond_32_bit_slots_is_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match=r"num_blocks \* block_size is 2147483648"):
        je.EngineConfig(num_blocks=2**27, block_size=16)
    with pytest.raises(ValueError, match=r"num_blocks \* block_size is 10000000000"):
        je.EngineConfig(num_blocks=np.int32(10**5), block_size=np.int32(10**5))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("memory_fraction", -0.1, ValueError, "give a finite value from 0.0 to 1.0"),
        ("memory_fraction", 1.01, ValueError, "give a finite value from 0.0 to 1.0"),
        ("memory_fraction", float("nan"), ValueError, "give a finite value from 0.0 to 1.0"),
        ("memory_fraction", "0.5", TypeError, "give a number"),
        ("memory_fraction", True, TypeError, "give a number"),
        ("policy", "decode_first", TypeError, "give a function from Candidates to their order"),
        ("policy", None, TypeError, "give a function"),
        ("preemption", "swap", ValueError, "give one of 'recompute', 'none'"),
        ("preemption", None, TypeError, "give one of 'recompute', 'none'"),
        ("failure_policy", "retry", ValueError, "give one of 'stop', 'isolate'"),
        ("failure_policy", [], TypeError, "give one of 'stop', 'isolate'"),
        ("batching", "continuous", ValueError, "give one of 'dynamic', 'static'"),
        ("batching", np.array(["static", "static"]), TypeError, "give one of 'dynamic', 'static'"),
        ("check_invariants", 1, TypeError, "give True or False"),
        ("check_invariants", None, TypeError, "give True or False"),
    ],
)
def test_T2_settings_of_an_engine_that_are_none_are_named(name, value, error, words):
    with pytest.raises(error, match=rf"EngineConfig\.{name} is .*{words}"):
        je.EngineConfig(**{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(je.EngineConfig)])
def test_T2_every_setting_of_an_engine_is_checked(name):
    """So a new one can't come without its check."""
    with pytest.raises((TypeError, ValueError), match=rf"EngineConfig\.{name} is "):
        je.EngineConfig(**{name: object()})


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("temperature", -0.1, ValueError, "from 0.0"),
        ("temperature", float("nan"), ValueError, "from 0.0"),
        ("temperature", 10**400, ValueError, "inf; give a finite value from 0.0"),
        ("presence_penalty", -(10**400), ValueError, "inf; give a finite value from -2.0"),
        ("temperature", float("inf"), ValueError, "from 0.0"),
        ("temperature", 1e39, ValueError, "from 0.0"),
        ("temperature", "0.7", TypeError, "give a number"),
        ("temperature", True, TypeError, "give a number"),
        ("temperature", 1j, TypeError, "give a number"),
        ("top_p", -0.1, ValueError, "from 0.0 to 1.0"),
        ("top_p", 1.1, ValueError, "from 0.0 to 1.0"),
        ("top_p", float("nan"), ValueError, "from 0.0 to 1.0"),
        ("top_p", None, None, ""),
        ("top_k", 2.0, TypeError, "give an integer"),
        ("seed", 2**32, ValueError, "from 0 to 4294967295"),
        ("do_sample", 1, TypeError, "give True or False"),
        ("do_sample", "no", TypeError, "give True or False"),
    ],
)
def test_K4_sampling_values_out_of_range_are_named(name, value, error, words):
    if error is None:
        assert je.SamplingParams(**{name: value}) == je.SamplingParams()
        return
    with pytest.raises(error, match=f"SamplingParams.{name} is .*{words}"):
        je.SamplingParams(**{name: value})


def test_A1_sampling_must_be_sampling_params():
    with pytest.raises(TypeError, match=r"RequestOptions.sampling is .*give a SamplingParams"):
        je.RequestOptions(sampling={"temperature": 1.0})


@given(kind=st.sampled_from([np.int8, np.uint8, np.int32, np.int64, np.uint64]), value=st.integers(1, 100))
def test_A1_numpy_numbers_are_taken_as_the_plain_numbers_they_are(kind, value):
    config = je.EngineConfig(max_batch_size=kind(value), chunk_size=kind(value))
    assert config == je.EngineConfig(max_batch_size=value, chunk_size=value)
    assert type(config.max_batch_size) is type(config.chunk_size) is int
    turn = je.TurnOptions(kind(value))
    assert turn == je.TurnOptions(value)
    assert repr(turn) == repr(je.TurnOptions(value))
    params = je.SamplingParams(temperature=np.float32(value), top_p=np.float64(0.5), top_k=kind(value))
    assert params == je.SamplingParams(temperature=float(value), top_p=0.5, top_k=value)
    assert {type(params.temperature), type(params.top_p), type(params.top_k)} == {float, int}


@pytest.mark.parametrize("options", [je.EngineConfig, je.SamplingParams, je.RequestOptions, je.TurnOptions])
def test_A1_options_are_frozen_values(options):
    made = options()
    assert made == options()
    assert hash(made) == hash(options())
    for field in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
    with pytest.raises(TypeError):
        options(no_such_option=1)


@given(
    temperature=st.none() | st.floats(0, 100),
    top_k=st.none() | st.integers(0, 100),
    top_p=st.none() | st.floats(0, 1),
    do_sample=st.none() | st.booleans(),
    folder_samples=st.booleans(),
)
def test_K4_resolved_settings_are_greedy_exactly_when_one_of_the_rules_says_so(
    temperature, top_k, top_p, do_sample, folder_samples
):
    params = je.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, do_sample=do_sample)
    resolved = resolve_sampling(params, {"do_sample": folder_samples})
    asked = folder_samples or any(value is not None for value in (temperature, top_k, top_p))
    samples = asked if do_sample is None else do_sample
    chosen = 1.0 if temperature is None else temperature
    greedy = not samples or chosen <= 1e-5 or top_k == 1 or top_p == 0.0
    assert (resolved.temperature == 0.0) == greedy
    if not greedy:
        assert (resolved.temperature, resolved.top_k) == (chosen, top_k or 0)
        assert resolved.top_p == (1.0 if top_p is None else top_p)
