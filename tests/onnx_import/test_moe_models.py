"""S1, S3, E6: whole decoders whose MLPs are mixtures of experts, against ONNX Runtime on the same file."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx_import
from onnx_import.ops.packing import pack
from tests.onnx_import.reference import edited, logits, model, runtime_logits
from tests.onnx_import.test_exactness import own_token_attention

TOKENS = np.random.default_rng(0).integers(3, 300, 12).astype(np.int32)
EXPERTS, INNER = 4, 32
ATTRIBUTES = {
    "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1,
    "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0,
}  # fmt: skip


def experts_for(proto: onnx.ModelProto, layer: int, *, quantised: bool) -> None:
    """Put a router and experts where the layer's MLP ends; what leads there only is no longer read."""
    prefix = f"/model/layers.{layer}/mlp"
    down = next(node for node in proto.graph.node if node.name == f"{prefix}/down_proj/MatMul")
    gate = next(node for node in proto.graph.node if node.name == f"{prefix}/gate_proj/MatMul")
    (hidden,) = (item.dims[1] for item in proto.graph.initializer if item.name == down.input[1])
    random = np.random.default_rng(layer)
    shapes = {
        "router": (hidden, EXPERTS),
        "fc1": (EXPERTS, 2 * INNER, hidden),
        "fc2": (EXPERTS, hidden, INNER),
    }
    made = {name: random.standard_normal(shape, np.float32) / 6 for name, shape in shapes.items()}
    made |= {
        f"{name}_bias": random.standard_normal(made[name].shape[:2], np.float32) for name in ("fc1", "fc2")
    }
    made["shape"] = np.array([-1, EXPERTS], np.int64)
    order = ["fc1", "fc1_bias", "fc2", "fc2_bias"]
    attributes: dict[str, Any] = dict(ATTRIBUTES)
    if quantised:
        for name in ("fc1", "fc2"):
            rows, columns = made[name].shape[1:]
            made[name] = pack(random.integers(0, 16, (EXPERTS, rows, columns)).astype(np.uint8), 4)
            made[f"{name}_scales"] = random.uniform(0.02, 0.04, (EXPERTS, rows, columns // 16)).astype(
                np.float32
            )
        order = ["fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias"]
        attributes |= {"expert_weight_bits": 4, "block_size": 16}
    named = {name: f"{prefix}/{name}" for name in made}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, named[name]) for name, array in made.items()
    )
    at = list(proto.graph.node).index(down)
    nodes = [
        onnx.helper.make_node("MatMul", [gate.input[0], named["router"]], [f"{prefix}/raw"], name=f"{prefix}/raw"),
        onnx.helper.make_node("Reshape", [f"{prefix}/raw", named["shape"]], [f"{prefix}/flat"], name=f"{prefix}/flat"),
        onnx.helper.make_node(
            "QMoE" if quantised else "MoE", [gate.input[0], f"{prefix}/flat", *(named[name] for name in order)],
            [down.output[0]], name=f"{prefix}/moe", domain="com.microsoft", **attributes,
        ),
    ]  # fmt: skip
    proto.graph.node.remove(down)
    for offset, node in enumerate(nodes):
        proto.graph.node.insert(at + offset, node)


@pytest.fixture(scope="module", params=[False, True], ids=["MoE", "QMoE"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    def change(proto: onnx.ModelProto) -> None:
        for layer in (0, 1):
            experts_for(proto, layer, quantised=request.param)

    return edited(model("cpu-fp32"), tmp_path_factory.mktemp("moe") / "model", change)


def test_S3_decoders_of_experts_agree_with_the_runtime(folder: Path) -> None:
    """S3: within 1e-3 of the largest logit; the last layer's experts see the wanted rows only."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(folder))
    expected = runtime_logits(folder, TOKENS)
    np.testing.assert_allclose(logits(decoder, TOKENS), expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    rows = np.array([11, 3], np.int32)
    np.testing.assert_allclose(
        logits(decoder, TOKENS, rows), expected[rows], rtol=0, atol=1e-3 * np.abs(expected).max()
    )


@pytest.mark.parametrize("weights", ["exact", "fast"])
def test_E6_decoders_of_experts_are_exact(folder: Path, weights: onnx_import.WeightMode) -> None:
    """E6: a token's logits keep their bits whatever runs beside it."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(folder), weights)
    run = jax.jit(
        lambda params, tokens, rows: decoder.apply(params, tokens, tokens, own_token_attention, rows)[0]
    )
    whole = np.asarray(run(decoder.params, TOKENS, np.arange(12, dtype=np.int32)))
    few = np.asarray(run(decoder.params, TOKENS[-3:], np.array([2, 0], np.int32)))
    np.testing.assert_array_equal(few, whole[[11, 9]])
