"""S2, S3, E6: mixtures of experts against ONNX Runtime where it has a kernel, and against NumPy from the definition."""

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnx_import.ops.experts import mix, route, sparse_mixer
from onnx_import.ops.packing import pack
from tests.onnx_import.one_node import assert_exact, imported, node, runtime

EXPERTS, HIDDEN, INNER = 5, 48, 32
DENSE = "x router fc1 fc1_bias fc2 fc2_bias"


def dense(
    seed: int = 0, *, fused: int = 1, third: bool = False, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """Constants of an MoE node."""
    random = np.random.default_rng(seed)
    shapes = {
        "fc1": (EXPERTS, fused * INNER, HIDDEN), "fc1_bias": (EXPERTS, fused * INNER),
        "fc2": (EXPERTS, HIDDEN, INNER), "fc2_bias": (EXPERTS, HIDDEN),
    }  # fmt: skip
    if third:
        shapes |= {"fc3": (EXPERTS, INNER, HIDDEN), "fc3_bias": (EXPERTS, INNER)}
    return {
        name: random.standard_normal(shape, np.float32).astype(dtype) / 4 for name, shape in shapes.items()
    }


def activations(tokens: int = 6, seed: int = 9) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((tokens, HIDDEN), np.float32),
        "router": random.standard_normal((tokens, EXPERTS), np.float32) * 2,
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oracle(feed: dict[str, np.ndarray], constants: dict[str, np.ndarray], **attributes: Any) -> np.ndarray:
    """The definition, token after token, in float64."""
    wide = {name: array.astype(np.float64) for name, array in {**feed, **constants}.items()}
    out = np.zeros_like(wide["x"])
    for token, row in enumerate(wide["x"]):
        logits = wide["router"][token]
        chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-logits, kind="stable")[: attributes.get("k", 1)]
        weights = wide["weights"][token][chosen] if "weights" in wide else chances[chosen]
        if attributes.get("normalize_routing_weights"):
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            layers = {name: layer(wide, name, expert) for name in ("fc1", "fc2", "fc3") if name in wide}
            out[token] += weight * layers["fc2"](hidden(row, layers, attributes))
    return out


def layer(wide: dict[str, np.ndarray], name: str, expert: int) -> Callable[[np.ndarray], np.ndarray]:
    bias = wide[f"{name}_bias"][expert] if f"{name}_bias" in wide else 0
    return lambda row: wide[name][expert] @ row + bias


def hidden(row: np.ndarray, layers: Any, attributes: dict[str, Any]) -> np.ndarray:
    """What goes into fc2."""
    first, kind = layers["fc1"](row), attributes.get("activation_type", "relu")
    if kind not in ("swiglu", "geglu"):
        act = {
            "relu": lambda x: np.maximum(x, 0), "relu2": lambda x: np.maximum(x, 0) ** 2, "gelu": tanh_gelu,
            "silu": lambda x: x * sigmoid(x), "identity": lambda x: x,
        }[kind](first)  # fmt: skip
        return act * layers["fc3"](row) if "fc3" in layers else act
    half = len(first) // 2
    gate, linear = {
        0: lambda: (first, layers["fc3"](row)),
        1: lambda: (first[0::2], first[1::2]),
        2: lambda: (first[:half], first[half:]),
    }[attributes.get("swiglu_fusion", 0)]()
    if kind == "geglu":
        return tanh_gelu(gate) * linear
    limit, alpha = attributes.get("swiglu_limit", np.inf), attributes.get("activation_alpha", 1.0)
    linear = np.clip(linear, -limit, limit)
    if attributes.get("swiglu_limit_after_activation"):
        act = np.minimum(gate * sigmoid(alpha * gate), limit)
    else:
        gate = np.minimum(gate, limit)
        act = gate * sigmoid(alpha * gate)
    return act * (linear + attributes.get("activation_beta", 0.0))


GPT_OSS = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.5}
FORMS: list[dict[str, Any]] = [
    *({"activation_type": kind, "k": 2} for kind in ("relu", "gelu", "silu", "identity")),
    {"activation_type": "silu", "k": 1, "normalize_routing_weights": 1},
    {"activation_type": "silu", "k": 5, "normalize_routing_weights": 1},
    {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2},
    {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, "normalize_routing_weights": 1, **GPT_OSS},
]
WITHOUT_KERNEL: list[dict[str, Any]] = [
    {"activation_type": "relu2", "k": 2},
    {"activation_type": "geglu", "swiglu_fusion": 1, "k": 2},
    {"activation_type": "geglu", "swiglu_fusion": 2, "k": 2},
    {"activation_type": "swiglu", "swiglu_fusion": 2, "k": 3, **GPT_OSS},
    {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, "swiglu_limit_after_activation": 1, **GPT_OSS},
]


def fused(attributes: dict[str, Any]) -> int:
    return 2 if attributes.get("swiglu_fusion") else 1


@pytest.mark.parametrize("attributes", FORMS, ids=str)
def test_S3_experts_agree_with_the_runtime_and_the_definition(attributes: dict[str, Any]) -> None:
    """S3: activations, numbers of experts a token, with and without dividing weights by their sum."""
    constants, feed = dense(fused=fused(attributes)), activations()
    proto = node("MoE", DENSE, **attributes)
    (found,) = imported(proto, feed, constants, jit=True)
    np.testing.assert_allclose(found, runtime(proto, feed, constants)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, oracle(feed, constants, **attributes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attributes", WITHOUT_KERNEL, ids=str)
def test_S3_experts_agree_with_the_definition(attributes: dict[str, Any]) -> None:
    """S3: what ONNX Runtime runs on a GPU only."""
    constants, feed = dense(fused=fused(attributes)), activations()
    (found,) = imported(node("MoE", DENSE, **attributes), feed, constants, jit=True)
    np.testing.assert_allclose(found, oracle(feed, constants, **attributes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "swiglu", "gelu"])
def test_S3_a_third_layer_multiplies_the_activation(kind: str) -> None:
    """S3: Mixtral's experts, and swiglu from two weights (swiglu_fusion=0); no kernel on a CPU either."""
    attributes = {"activation_type": kind, "k": 2, "normalize_routing_weights": 1}
    constants, feed = dense(third=True), activations()
    (found,) = imported(node("MoE", f"{DENSE} fc3 fc3_bias", **attributes), feed, constants, jit=True)
    np.testing.assert_allclose(found, oracle(feed, constants, **attributes), rtol=1e-4, atol=1e-5)


def test_S3_experts_without_biases_take_three_dimensions() -> None:
    constants = {name: array for name, array in dense().items() if not name.endswith("_bias")}
    proto, feed = node("MoE", "x router fc1 - fc2", k=2, activation_type="silu"), activations()
    (flat,) = imported(proto, feed, constants, jit=True)
    np.testing.assert_allclose(flat, runtime(proto, feed, constants)[0], rtol=1e-4, atol=1e-5)
    (cubic,) = imported(proto, feed | {"x": feed["x"][None]}, constants, jit=True)
    np.testing.assert_array_equal(cubic, flat[None])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_S2_narrow_experts_are_summed_in_float32(dtype: Any) -> None:
    """S2: float16 and bfloat16 exports; only what goes between layers and out is rounded."""
    attributes = {"activation_type": "swiglu", "swiglu_fusion": 1, "k": 2, "normalize_routing_weights": 1}
    constants = dense(fused=2, dtype=dtype)
    feed = {name: array.astype(dtype) for name, array in activations().items()}
    (found,) = imported(node("MoE", DENSE, **attributes), feed, constants, jit=True)
    assert found.dtype == dtype
    expected = oracle(feed, constants, **attributes)
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def quantised(
    bits: int, block: int, *, zeros: bool, third: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """QMoE's constants, the same experts dequantised, and the names of its inputs."""
    random = np.random.default_rng(bits + block)
    packed, plain = {}, dense(third=third)
    layers = {"fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER)} | ({"fc3": (INNER, HIDDEN)} if third else {})
    points = {}
    for layer, (rows, columns) in layers.items():
        size = block or columns
        blocks = columns // size
        codes = random.integers(0, 1 << bits, (EXPERTS, rows, columns)).astype(np.uint8)
        scales = random.uniform(0.5, 1, (EXPERTS, rows, blocks)).astype(np.float32) / (1 << bits)
        zero = random.integers(0, 1 << bits, (EXPERTS, rows, blocks)).astype(np.uint8)
        if not zeros:
            zero[:] = 1 << (bits - 1)
        spread = np.arange(columns) // size
        plain[layer] = (codes.astype(np.float32) - zero[..., spread]) * scales[..., spread]
        packed[layer] = pack(codes, bits)
        packed[f"{layer}_scales"] = scales if block else scales[..., 0]
        packed[f"{layer}_bias"] = plain[f"{layer}_bias"]
        points[f"{layer}_zeros"] = pack(zero if block else zero[..., 0], bits)
    inputs = "x router " + " ".join(packed)
    if zeros:
        inputs = " ".join([inputs, *([] if third else "---"), *points])
        packed |= points
    return packed, plain, inputs


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_S3_quantised_experts_agree_with_the_runtime_and_the_definition(
    bits: int, block: int, zeros: bool
) -> None:
    """S3, case C11: a scale for a whole row or a block of it; three blocks a row, so zero points end within a byte."""
    attributes = {"activation_type": "silu", "k": 2, "normalize_routing_weights": 1}
    packed, plain, inputs = quantised(bits, block, zeros=zeros)
    sizes = {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    proto, feed = node("QMoE", inputs, **attributes, **sizes), activations()
    (found,) = imported(proto, feed, packed, jit=True)
    np.testing.assert_allclose(found, oracle(feed, plain, **attributes), rtol=1e-4, atol=1e-4)
    # The runtime multiplies 8-bit experts by activations rounded to 8 bits.
    loose = 0.05 if bits == 8 else 1e-3
    np.testing.assert_allclose(
        found, runtime(proto, feed, packed)[0], rtol=loose, atol=loose * np.abs(found).max()
    )


def test_S3_quantised_experts_take_a_third_layer_and_bits_for_each() -> None:
    """S3: fc3 with its own inputs, and fcN_expert_weight_bits over expert_weight_bits."""
    attributes = {"activation_type": "silu", "k": 2}
    packed, plain, inputs = quantised(4, 16, zeros=True, third=True)
    eight, wide, _ = quantised(8, 16, zeros=True, third=True)
    for name in packed:
        if name.startswith("fc2"):
            packed[name] = eight[name]
    plain["fc2"] = wide["fc2"]
    proto = node("QMoE", inputs, block_size=16, fc2_expert_weight_bits=8, **attributes)
    (found,) = imported(proto, activations(), packed, jit=True)
    np.testing.assert_allclose(found, oracle(activations(), plain, **attributes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalise", [0, 1])
def test_S3_other_weights_may_mix_the_chosen_experts(normalise: int) -> None:
    """S3: router_probs chooses, router_weights mixes, as they are or divided by their sum."""
    attributes = {"activation_type": "silu", "k": 2, "normalize_routing_weights": normalise}
    packed, plain, inputs = quantised(4, 16, zeros=False)
    feed = activations() | {
        "weights": np.random.default_rng(3).uniform(0.1, 1, (6, EXPERTS)).astype(np.float32)
    }
    proto = node("QMoE", inputs + " -" * 6 + " weights", block_size=16, **attributes)
    (found,) = imported(proto, feed, packed, jit=True)
    np.testing.assert_allclose(found, oracle(feed, plain, **attributes), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found, runtime(proto, feed, packed)[0], rtol=1e-3, atol=1e-3)


def test_S3_integer_experts_stay_close_to_the_exact_ones() -> None:
    """S3: weights="fast" requantises each expert's rows to int8."""
    packed, _, inputs = quantised(4, 16, zeros=True)
    proto = node("QMoE", inputs, block_size=16, activation_type="silu", k=2)
    exact, fast = (imported(proto, activations(), packed, mode, jit=True)[0] for mode in ("exact", "fast"))
    assert 0 < np.abs(exact - fast).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_E6_a_tokens_bits_do_not_depend_on_the_others(mode: str) -> None:
    """E6: 2 to 300 tokens, so tiles of both sizes, filled and not; other tokens choose other experts."""
    packed, _, inputs = quantised(4, 16, zeros=True)
    proto = node("QMoE", inputs, block_size=16, activation_type="silu", k=2)
    assert_exact(proto, activations(300), packed, (2, 40), mode)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_E6_float_experts_keep_a_tokens_bits(dtype: Any) -> None:
    """E6: with a crowd that all chooses one expert, and weights wider than a block of columns."""
    random = np.random.default_rng(0)
    shapes = {"fc1": (3, 200, 48), "fc1_bias": (3, 200), "fc2": (3, 48, 100), "fc2_bias": (3, 48)}
    constants = {
        name: random.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()
    }
    feed = {
        "x": random.standard_normal((150, 48), np.float32),
        "router": random.standard_normal((150, 3), np.float32),
    }
    feed["router"][:100, 1] += 10
    proto = node("MoE", DENSE, activation_type="swiglu", swiglu_fusion=1, k=2, normalize_routing_weights=1)
    assert_exact(proto, {name: array.astype(dtype) for name, array in feed.items()}, constants, (2, 17))


def test_E6_a_token_that_is_not_a_number_spoils_no_other() -> None:
    """E6: it shares tiles with the others, and its own result is noticed."""
    constants, feed = dense(), activations()
    proto = node("MoE", DENSE, k=2, activation_type="silu")
    (clean,) = imported(proto, feed, constants, jit=True)
    feed = {name: array.copy() for name, array in feed.items()}
    feed["x"][2], feed["router"][2] = np.nan, np.nan
    (found,) = imported(proto, feed, constants, jit=True)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, axis=0), np.delete(clean, 2, axis=0))


@jax.jit
def numbered(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """A mixture of seven experts that multiply by their number."""
    return mix(x, weights, experts, 7, lambda rows, number: rows * number.astype(rows.dtype))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=7, max_size=7, unique=True),
    st.floats(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_S3_every_token_goes_to_its_own_experts(ranks: list[int], skew: float, seed: int) -> None:
    """S3: experts with no token, with one, and with more than fill a tile, in any order."""
    random = np.random.default_rng(seed)
    liking = random.standard_normal((33, 7)) + skew * np.array(ranks)
    experts = np.argsort(-liking, axis=1)[:, :2].astype(np.int32)
    x = random.integers(-4, 5, (33, 3)).astype(np.float32)
    weights = random.integers(1, 4, (33, 2)).astype(np.float32)
    found = numbered(x, weights, experts)
    np.testing.assert_array_equal(found, x * (weights * experts).sum(axis=1, keepdims=True))


def test_S3_equal_logits_choose_experts_in_order() -> None:
    weights, experts = route(np.zeros((2, 6), np.float32), 3, normalise=False)
    assert np.asarray(experts).tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 6, rtol=1e-6)


@given(st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6), st.booleans())
def test_S3_the_sparse_mixer_weighs_only_what_comes_near(values: list[float], close: bool) -> None:
    """S3: two choices, each with a softmax over what is within 2 % of it; NumPy, since only a GPU has a kernel."""
    logits = np.array(values, np.float32)
    if close:
        logits = (3 + logits / 100).astype(np.float32)
    weights, experts = sparse_mixer(logits[None])
    left = logits.astype(np.float64)
    for weight, expert in zip(np.asarray(weights)[0], np.asarray(experts)[0], strict=True):
        assert left[expert] == left.max()
        room = 0.02 * np.maximum(np.abs(logits.astype(np.float64)), left.max()) - (left.max() - left)
        assume(np.abs(room).min() > 1e-6)
        np.testing.assert_allclose(weight, 1 / np.exp(left[room > 0] - left.max()).sum(), rtol=1e-5)
        left[expert] = -np.inf


def test_S3_a_sparse_mixers_choice_goes_through_its_experts() -> None:
    constants, feed = dense(), activations()
    (found,) = imported(
        node("MoE", DENSE, activation_type="silu", k=2, use_sparse_mixer=1), feed, constants, jit=True
    )
    weights, experts = (np.asarray(array) for array in sparse_mixer(feed["router"]))
    expected = np.zeros_like(found)
    for choice in range(2):
        one_hot = np.where(np.arange(EXPERTS) == experts[:, choice : choice + 1], 0.0, -1e9).astype(
            np.float32
        )
        part = oracle(feed | {"router": one_hot}, constants, activation_type="silu", k=1)
        expected += (weights[:, choice : choice + 1] * part).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
