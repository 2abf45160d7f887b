"""S2, cases C14 and C19: everything unsupported is listed at once, by node, before any weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_import
from onnx_import.ops import REGISTRY
from onnx_import.registry import Operator, Registry
from tests.onnx_import.reference import edited, model, node_of, set_attribute

Edit = Callable[[onnx.ModelProto], None]


def problems(folder: Path) -> tuple[str, ...]:
    """What an import refuses, without its data file ever being there; `inspect_folder` must agree."""
    (folder / "model.onnx.data").unlink(missing_ok=True)
    read = onnx_import.read_folder(folder)
    with pytest.raises(onnx_import.UnsupportedGraph) as caught:
        onnx_import.import_decoder(read)
    assert onnx_import.inspect_folder(read).unsupported == caught.value.problems
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_case_C19_two_unknown_operators_are_both_listed(tmp_path: Path) -> None:
    def change(proto: onnx.ModelProto) -> None:
        sigmoid, final = node_of(proto, "Sigmoid"), proto.graph.node[-1]
        sigmoid.op_type, sigmoid.domain = "Fancy", "my.domain"
        final.op_type = "Hardmax"

    first, second = problems(edited(model("cpu-fp32"), tmp_path / "copy", change))
    assert first.startswith("my.domain::Fancy (node '/model/layers.0/mlp/act_fn/Sigmoid') isn't supported")
    assert second.startswith("ai.onnx::Hardmax (node '/lm_head/MatMul') isn't supported at opset 2")


@pytest.mark.parametrize(
    ("op_type", "name", "value"),
    [
        ("GroupQueryAttention", "novelty", 1),
        ("GroupQueryAttention", "softcap", -1.0),
        ("GroupQueryAttention", "local_window_size", 0),
        ("GroupQueryAttention", "local_window_size", -2),
        ("GroupQueryAttention", "sliding_window_cache", 1),
        ("GroupQueryAttention", "smooth_softmax", 2),
        ("GroupQueryAttention", "causal", 0),
        ("GroupQueryAttention", "qk_output", 1),
        ("GroupQueryAttention", "kv_cache_bit_width", 4),
        ("GroupQueryAttention", "k_quant_type", "PER_TENSOR"),
        ("SimplifiedLayerNormalization", "axis", 0),
        ("MatMul", "novelty", 0),
        ("Gather", "novelty", 1),
    ],
)
def test_case_C14_attributes_are_honoured_or_refused_by_name(
    tmp_path: Path, op_type: str, name: str, value: Any
) -> None:
    def change(proto: onnx.ModelProto) -> None:
        node = [node for node in proto.graph.node if node.op_type == op_type][-1]
        if op_type == "Gather":
            node = next(node for node in proto.graph.node if "embed" in node.name)
        set_attribute(node, name, value)

    (problem,) = problems(edited(model("cpu-fp32"), tmp_path / "copy", change))
    assert f"::{op_type} (node '/" in problem
    assert name in problem


@pytest.mark.parametrize("value", ["s", [1], [0.5]])
@pytest.mark.parametrize("name", ["num_heads", "kv_num_heads", "local_window_size", "softcap", "scale"])
def test_T2_an_attribute_of_another_type_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    """T2, S2: a file can hold any type under any name."""

    def change(proto: onnx.ModelProto) -> None:
        set_attribute(node_of(proto, "GroupQueryAttention"), name, value)

    folder = edited(model("cpu-fp32"), tmp_path / "copy", change)
    assert any(f"has {name}={value!r}, which isn't supported" in problem for problem in problems(folder))


@pytest.mark.parametrize(
    ("index", "name"), [(10, "attention_bias"), (11, "head_sink"), (12, "k_scale"), (16, "query_seqlens")]
)
def test_case_C14_optional_inputs_are_refused_by_name(tmp_path: Path, index: int, name: str) -> None:
    def change(proto: onnx.ModelProto) -> None:
        node = node_of(proto, "GroupQueryAttention")
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = "cos_cache"

    (problem,) = problems(edited(model("cpu-fp32"), tmp_path / "copy", change))
    assert "/model/layers.0/attn/GroupQueryAttention" in problem
    assert f"{name!r}" in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("novelty", 1),
        ("is_causal", 0),
        ("kv_cache_layout", "LATENT"),
        ("k_cache_dtype", "int4"),
        ("v_quant_type", "PER_CHANNEL"),
        ("rotary_offset", 8),
        ("v_head_size", 8),
        ("local_window_size", 0),
        ("softcap", -1.0),
    ],
)
def test_case_C14_paged_attributes_are_honoured_or_refused_by_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    def change(proto: onnx.ModelProto) -> None:
        set_attribute(node_of(proto, "PagedAttention"), name, value)

    (problem,) = problems(edited(model("paged-fp16"), tmp_path / "copy", change))
    assert "::PagedAttention (node '/model/layers.0/attn/PagedAttention')" in problem
    assert f"{name!r}" in problem or f"{name}={value!r}" in problem


@pytest.mark.parametrize(("index", "name"), [(10, "slot_mapping"), (14, "k_scale"), (15, "v_scale")])
def test_case_C14_paged_inputs_are_refused_by_name(tmp_path: Path, index: int, name: str) -> None:
    def change(proto: onnx.ModelProto) -> None:
        node_of(proto, "PagedAttention").input[index] = "cos_cache"

    (problem,) = problems(edited(model("paged-fp16"), tmp_path / "copy", change))
    assert f"{name!r} ('cos_cache')" in problem


def test_case_C14_sinks_of_another_number_are_refused(tmp_path: Path) -> None:
    def change(proto: onnx.ModelProto) -> None:
        node_of(proto, "PagedAttention").input[11] = "sinks"
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(5, np.float16), "sinks"))

    (problem,) = problems(edited(model("paged-fp16"), tmp_path / "copy", change))
    assert "has a 'head_sink' of shape (5,) for its 6 heads" in problem


def read_mask(proto: onnx.ModelProto) -> None:
    node_of(proto, "Mul").input[1] = "attention_mask"


def choose_rows(proto: onnx.ModelProto) -> None:
    proto.graph.input.append(onnx.helper.make_tensor_value_info("some_rows", onnx.TensorProto.INT64, ["n"]))
    head = proto.graph.node[-1]
    gather = onnx.helper.make_node("Gather", [head.input[0], "some_rows"], ["few"], name="/choose", axis=0)
    head.input[0] = "few"
    proto.graph.node.insert(len(proto.graph.node) - 1, gather)


def computed_shape(proto: onnx.ModelProto) -> None:
    reshape = node_of(proto, "Reshape")
    proto.graph.node.insert(0, onnx.helper.make_node("Neg", ["input_ids"], ["sizes"], name="/sizes"))
    reshape.input[1] = "sizes"


def double_weight(proto: onnx.ModelProto) -> None:
    next(t for t in proto.graph.initializer if "final_norm" in t.name).data_type = onnx.TensorProto.DOUBLE


def lost_value(proto: onnx.ModelProto) -> None:
    node_of(proto, "Mul").input[1] = "nowhere"


def own_output(proto: onnx.ModelProto) -> None:
    node_of(proto, "Mul").input[1] = node_of(proto, "Mul").output[0]


def wrong_width(proto: onnx.ModelProto) -> None:
    next(t for t in proto.graph.initializer if "final_norm" in t.name).dims[0] = 63


def no_attention_layer(proto: onnx.ModelProto) -> None:
    node_of(proto, "GroupQueryAttention").input[3] = "cache"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (read_mask, "/model/layers.0/mlp/act_fn/Mul') reads the graph input 'attention_mask'"),
        (choose_rows, "/choose') reads the graph input 'some_rows'"),
        (computed_shape, "q_norm/Reshape_1') needs its input 'shape' ('sizes') to be a constant"),
        (double_weight, "of type float64, which isn't supported"),
        (lost_value, "reads the undefined value 'nowhere'"),
        (own_output, "reads the undefined value '/model/layers.0/mlp/act_fn/Mul/output_0'"),
        (no_attention_layer, "layer 0 has no attention in the graph"),
    ],
)
def test_S2_other_things_are_named_with_their_node(tmp_path: Path, edit: Edit, expected: str) -> None:
    found = problems(edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", edit))
    assert any(expected in problem for problem in found)


def test_S2_shapes_that_do_not_fit_are_found_without_weights(tmp_path: Path) -> None:
    folder = edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", wrong_width)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(onnx_import.UnsupportedGraph, match="final_norm_layernorm/SkipLayerNorm"):
        onnx_import.import_decoder(onnx_import.read_folder(folder))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "state_groups",
            [{"kind": "paged_kv", "layer_ids": [0, 1]}, {"kind": "fixed_conv", "layer_ids": [1]}],
            "the graph has no input 'past.1.conv', which the state group 'fixed_conv' names",
        ),
        ("state_groups", [], "no state group 'paged_kv'"),
        ("state_groups", [{"kind": "paged_kv", "layer_ids": [0]}], "layer 1 has no attention in the conf"),
    ],
)
def test_H1_H2_states_that_the_graph_does_not_have_are_refused(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    folder = edited(model("cpu-fp32"), tmp_path / "copy", lambda proto: None)
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"][key] = value
    config["model"]["decoder"]["inputs"]["past_conv_names"] = "past.%d.conv"
    config["model"]["decoder"]["outputs"]["present_conv_names"] = "present.%d.conv"
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert any(expected in problem for problem in problems(folder))


def test_S2_the_newest_operator_not_above_the_opset_wins() -> None:
    old = REGISTRY.find("", "MatMul", 21)
    assert old is not None
    new = Operator("", "MatMul", 22, old.inputs, old.attributes, old.run)
    registry = Registry((new, old))
    assert [registry.find("", "MatMul", opset) for opset in (0, 1, 21, 22, 30)] == [None, old, old, new, new]


def test_unknown_weight_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="use 'exact' or 'fast'"):
        onnx_import.import_decoder(onnx_import.read_folder(model("cpu-fp32")), "fastest")  # type: ignore[arg-type]


def test_T1_report_counts_live_operators_and_bytes() -> None:
    """T1: what `jaxengine inspect` prints; the mask's sub-graph is not counted."""
    report = onnx_import.inspect_folder(onnx_import.read_folder(model("cpu-int4")))
    assert report.operators["com.microsoft", "GroupQueryAttention"] == 2
    assert ("", "ReduceSum") not in report.operators
    assert report.skipped_nodes == 6
    assert report.unsupported == ()
    assert report.weight_bytes == (model("cpu-int4") / "model.onnx.data").stat().st_size
    assert set(report.weight_bytes_by_type) == {"float32", "uint8"}
