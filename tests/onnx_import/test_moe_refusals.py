"""S2, case C11: what mixtures of experts carry and don't honour is named."""

from typing import Any

import numpy as np
import pytest

from tests.onnx_import.one_node import node, problems
from tests.onnx_import.test_moe import DENSE, EXPERTS, HIDDEN, INNER, activations, dense, quantised


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activation_type": "mish"}, "has activation_type='mish'"),
        ({"activation_type": "swiglu"}, "with swiglu_fusion=0 and no fc3"),
        ({"activation_type": "silu", "swiglu_fusion": 1}, "has swiglu_fusion=1 with activation_type='silu'"),
        (
            {"activation_type": "silu", "activation_alpha": 1.5},
            "has activation_alpha=1.5 with activation_type='silu'",
        ),
        (
            {"activation_type": "silu", "swiglu_limit": 7.0},
            "has swiglu_limit=7.0 with activation_type='silu'",
        ),
        ({"k": 6}, "has k=6 of 5 experts"),
        ({"k": 3, "use_sparse_mixer": 1}, "use_sparse_mixer=1 with k=3"),
        ({"k": 2, "use_sparse_mixer": 1, "normalize_routing_weights": 1}, "with weights of its own"),
        ({"tensor_shards": 2}, "has attribute 'tensor_shards', which isn't known"),
    ],
)
def test_S2_what_experts_do_not_honour_is_named(attributes: dict[str, Any], message: str) -> None:
    (problem,) = problems(node("MoE", DENSE, **attributes), dense(), activations())
    assert message in problem


@pytest.mark.parametrize(
    ("op_type", "name", "shape", "wanted"),
    [
        ("MoE", "fc1", (EXPERTS, HIDDEN, INNER), [EXPERTS, INNER, HIDDEN]),
        ("MoE", "fc1_bias", (EXPERTS, HIDDEN), [EXPERTS, INNER]),
        ("QMoE", "fc1", (EXPERTS, INNER, HIDDEN), [EXPERTS, INNER, HIDDEN // 2]),
        ("QMoE", "fc1_scales", (EXPERTS, INNER), [EXPERTS, INNER, HIDDEN // 16]),
        ("QMoE", "fc1_zeros", (EXPERTS, INNER, 1), [EXPERTS, INNER, 2]),
    ],
)
def test_case_C11_experts_of_other_layouts_are_refused_with_both_shapes(
    op_type: str, name: str, shape: tuple[int, ...], wanted: list[int]
) -> None:
    """Case C11: nothing is read in another shape, also where the number of elements fits."""
    constants, inputs = dense(), DENSE
    if op_type == "QMoE":
        constants, _, inputs = quantised(4, 16, zeros=True)
    constants[name] = np.zeros(shape, constants[name].dtype)
    attributes = {"block_size": 16} if op_type == "QMoE" else {}
    (problem,) = problems(node(op_type, inputs, **attributes), constants, activations())
    assert f"of shape {wanted}, but its shape is {list(shape)}" in problem


def test_S2_experts_packed_for_a_gpu_are_refused_with_a_remedy() -> None:
    """S2: they lie [experts, in, out / 2], with as many bytes as raw ones and nothing else to tell."""
    constants, _, inputs = quantised(4, 16, zeros=False)
    constants["fc1"] = np.zeros((EXPERTS, HIDDEN, INNER), np.uint8)
    constants["fc2"] = np.zeros((EXPERTS, INNER, HIDDEN // 2), np.uint8)
    proto = node("QMoE", inputs, block_size=16, activation_type="swiglu", swiglu_fusion=1)
    (problem,) = problems(proto, constants, activations())
    assert f"of shape {list(constants['fc1'].shape)}, packed for a GPU; export it with raw weights" in problem


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"quant_type": "fp4"}, "has quant_type='fp4'"),
        ({"expert_weight_bits": 3}, "has expert_weight_bits=3"),
        ({"block_size": 8}, "has block_size=8"),
        ({"weights_prepacked": 1}, "has weights_prepacked=1"),
    ],
)
def test_S2_other_quantisations_of_experts_are_named(attributes: dict[str, Any], message: str) -> None:
    constants, _, inputs = quantised(4, 16, zeros=False)
    (problem,) = problems(node("QMoE", inputs, **({"block_size": 16} | attributes)), constants, activations())
    assert message in problem


@pytest.mark.parametrize("position", range(15, 21))
def test_S2_scales_of_other_quantisations_are_named(position: int) -> None:
    constants, _, inputs = quantised(4, 16, zeros=False)
    names = inputs.split()
    proto = node("QMoE", " ".join([*names, *"-" * (position - len(names)), "router"]), block_size=16)
    (problem,) = problems(proto, constants, activations())
    assert "('router'), which isn't supported" in problem
