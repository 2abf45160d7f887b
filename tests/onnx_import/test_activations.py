"""S2, S3: activations and norms of the com.microsoft domain against ONNX Runtime, or NumPy where it has no kernel."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from tests.onnx_import.one_node import assert_exact, imported, node, problems, runtime

RANDOM = np.random.default_rng(0)
WIDTH = 48


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


X, SKIP, GATE = normal(70, WIDTH) * 3, normal(70, WIDTH), normal(70, WIDTH)
VECTORS = {name: normal(WIDTH) for name in ("bias", "gamma", "beta")}

ACTIVATIONS = [
    ("Gelu", "X", {}),
    ("BiasGelu", "X bias", {}),
    ("FastGelu", "X", {}),
    ("FastGelu", "X bias", {}),
    ("QuickGelu", "X", {}),
    ("QuickGelu", "X", {"alpha": 0.5}),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes"), ACTIVATIONS)
def test_S3_activations_agree_with_the_runtime(op_type: str, inputs: str, attributes: dict[str, Any]) -> None:
    proto = node(op_type, inputs, **attributes)
    constants = {name: VECTORS[name] for name in inputs.split()[1:]}
    feed = {"X": X}
    np.testing.assert_allclose(
        imported(proto, feed, constants)[0], runtime(proto, feed, constants)[0], rtol=1e-5, atol=1e-6
    )
    assert_exact(proto, feed, constants)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("op_type", "inputs", "attributes"), ACTIVATIONS)
def test_S2_activations_of_narrow_floats_are_computed_in_float32(
    op_type: str, inputs: str, attributes: dict[str, Any], dtype: type
) -> None:
    """S2: bfloat16 wherever float16 is honoured; one rounding, at the end."""
    proto = node(op_type, inputs, **attributes)
    wide = {name: VECTORS[name].astype(dtype).astype(np.float32) for name in inputs.split()[1:]}
    x = X[:5].astype(dtype)
    (expected,) = imported(proto, {"X": x.astype(np.float32)}, wide)
    (found,) = imported(proto, {"X": x}, {name: array.astype(dtype) for name, array in wide.items()})
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected.astype(dtype))


@pytest.mark.parametrize(
    "inputs", ["X skip gamma", "X skip gamma beta", "X skip gamma beta bias", "X skip gamma - bias"]
)
def test_S3_skip_layer_normalization_agrees_with_the_runtime(inputs: str) -> None:
    """S3: with and without beta and bias, and its fourth output, the sum that the next layer skips with."""
    proto = node("SkipLayerNormalization", inputs, "Y - - sum", epsilon=1e-5)
    constants = {name: VECTORS[name] for name in inputs.split()[2:] if name != "-"}
    feed = {"X": X[:5], "skip": SKIP[:5]}
    found = imported(proto, feed, constants)
    for ours, theirs in zip((found[0], found[3]), runtime(proto, feed, constants), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_exact(proto, {"X": X, "skip": SKIP}, constants)


def test_S2_skip_layer_normalization_names_what_it_does_not_honour() -> None:
    constants = {"gamma": VECTORS["gamma"], "table": SKIP}
    (mean,) = problems(
        node("SkipLayerNormalization", "X skip gamma", "Y mean"), constants, {"X": X, "skip": SKIP}
    )
    assert "fills output 1" in mean
    (constant,) = problems(node("SkipLayerNormalization", "X table gamma"), constants, {"X": X})
    assert "has a constant for its 'skip'" in constant


@pytest.mark.parametrize("given", [False, True])
def test_S3_embed_layer_normalization_agrees_with_the_runtime(given: bool) -> None:
    """S3: GPT-2 graphs; without position_ids the places of the packed tokens are the step's positions."""
    constants = {
        "words": normal(11, WIDTH),
        "places": normal(9, WIDTH),
        **{k: VECTORS[k] for k in ("gamma", "beta")},
    }
    inputs = "ids - words places - gamma beta" + (" - positions" if given else "")
    proto = node("EmbedLayerNormalization", inputs, "Y mask_index sum", epsilon=1e-5)
    tokens, positions = np.array([[3, 10, 0, 7]], np.int32), np.arange(4, dtype=np.int32)[None]
    feed = {"ids": tokens} | ({"positions": positions + 4} if given else {})
    expected = runtime(proto, feed, constants, {"mask_index": onnx.TensorProto.INT32})
    found = imported(proto, feed, constants, positions=positions[0])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_S3_embeddings_past_their_tables_are_not_a_number() -> None:
    constants = {
        "words": normal(11, WIDTH),
        "places": normal(9, WIDTH),
        **{k: VECTORS[k] for k in ("gamma", "beta")},
    }
    proto = node("EmbedLayerNormalization", "ids - words places - gamma beta - positions", "Y")
    feed = {"ids": np.array([[11, 3, 4]], np.int32), "positions": np.array([[0, 9, 8]], np.int32)}
    finite = np.isfinite(imported(proto, feed, constants)[0]).all(axis=-1)
    assert finite.tolist() == [[False, False, True]]


@pytest.mark.parametrize("name", ["segments", "mask"])
def test_S2_embed_layer_normalization_refuses_segments_and_masks(name: str) -> None:
    constants = {
        "words": normal(11, WIDTH),
        "places": normal(9, WIDTH),
        **{k: VECTORS[k] for k in ("gamma", "beta")},
    }
    feed = {"ids": np.zeros((1, 2), np.int32), name: np.zeros((1, 2), np.int32)}
    inputs = {
        "segments": "ids segments words places - gamma beta",
        "mask": "ids - words places - gamma beta mask",
    }[name]
    (problem,) = problems(node("EmbedLayerNormalization", inputs), constants, feed)
    assert f"({name!r}), which isn't supported" in problem


@pytest.mark.parametrize("activation", [None, "silu", "swish", "sigmoid"])
@pytest.mark.parametrize("group", [16, 48])
def test_S3_gated_norms_agree_with_the_runtime(activation: str | None, group: int) -> None:
    """S3: per head on a packed row (three groups of 16), and over the whole row."""
    attributes = {"activation": activation} if activation else {}
    proto = node("GatedRMSNorm", "X scale gate", epsilon=1e-6, **attributes)
    constants = {"scale": normal(group)}
    feed = {"X": X[:5], "gate": GATE[:5]}
    np.testing.assert_allclose(
        imported(proto, feed, constants)[0], runtime(proto, feed, constants)[0], rtol=1e-5, atol=1e-6
    )
    assert_exact(proto, {"X": X, "gate": GATE}, constants)


def test_S3_gated_sums_agree_with_the_runtime() -> None:
    proto = node("GatedAdd", "X Y gate", "Z")
    feed = {"X": X[:5], "Y": SKIP[:5], "gate": GATE[:5, :1]}
    np.testing.assert_allclose(
        imported(proto, feed, {})[0], runtime(proto, feed, {})[0], rtol=1e-6, atol=1e-6
    )


def test_S3_gated_sums_project_their_gate_in_bfloat16() -> None:
    """S3: NumPy from the definition, since only a GPU has this form; the rounding of each step shows."""

    def narrow(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    x, y, gate = (narrow(array[:5]) for array in (X, SKIP, GATE))
    weight = narrow(normal(WIDTH, 1) / 8)
    opened = narrow(1 / (1 + np.exp(-narrow(gate @ weight))))
    expected = narrow(x + narrow(y * opened))
    feed = {name: array.astype(ml_dtypes.bfloat16) for name, array in (("X", x), ("Y", y), ("gate", gate))}
    proto = node("GatedAdd", "X Y gate weight", "Z")
    constants = {"weight": weight.astype(ml_dtypes.bfloat16)}
    found = imported(proto, feed, constants)[0].astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=2**-7)
    assert (found == expected).mean() > 0.97
