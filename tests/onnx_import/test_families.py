"""S1, S3: decoders with windows, soft caps, sinks, experts, convolutions, recurrences and long tables, as exported."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_import
from tests.fixtures.gpt2 import GRAPHS, write_gpt2
from tests.model_checks import Reference
from tests.onnx_import.reference import edited, logits, model, node_of, set_attribute

TOKENS = np.random.default_rng(0).integers(3, 320, 40).astype(np.int32)
"""More than window (16) and long tables' threshold (32)."""

KINDS: dict[str, tuple[list[tuple[int | None, float | None]], list[tuple[int, ...]]]] = {
    "gemma2": ([(16, 50.0), (None, 50.0)], []),
    "gptoss": ([(16, None), (None, None)], []),
    "phi3-longrope": ([(None, None), (None, None)], []),
    "lfm2": ([(None, None)], [(64, 2)]),
    "lfm2moe": ([(None, None)], [(64, 2)]),
    "qwen3_5": ([(None, None)], [(128, 3), (4, 16, 16)] * 3),
}
"""Each attention layer's window and soft cap, and each fixed state's shape, of the fixtures."""


def load(folder: Path) -> onnx_import.Decoder:
    return onnx_import.import_decoder(onnx_import.read_folder(folder))


def assert_equals_runtime(folder: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits within a ten thousandth of the largest one; returns ONNX Runtime's."""
    expected = Reference(folder).logits(tokens)
    np.testing.assert_allclose(logits(load(folder), tokens), expected, atol=1e-4 * np.abs(expected).max())
    return expected


@pytest.mark.parametrize("form", ["cpu-fp32", "paged-fp16"])
@pytest.mark.parametrize("family", KINDS)
def test_S1_H1_both_forms_have_the_same_layers_and_states(family: str, form: str) -> None:
    """Only the recurrence's state is transposed, and square here."""
    layers, states = KINDS[family]
    decoder = load(model(form, family))
    assert [(spec.window, spec.softcap) for spec in decoder.layers] == layers
    assert [spec.shape for spec in decoder.fixed] == states
    assert decoder.layers[0].kv_dtype == (np.float32 if form == "cpu-fp32" else np.float16)


@pytest.mark.parametrize("family", KINDS)
def test_S3_fp32_logits_equal_the_runtimes(family: str) -> None:
    assert_equals_runtime(model("cpu-fp32", family))


@pytest.mark.parametrize("family", ["gemma2", "lfm2moe", "qwen3_5"])
def test_S3_int4_logits_equal_the_runtimes(family: str) -> None:
    """With float activations there too; tied tables (gemma2, lfm2moe), quantised experts, recurrences."""
    assert_equals_runtime(model("cpu-int4", family))


@pytest.mark.parametrize("count", [32, 33])
def test_S3_longrope_takes_the_table_that_the_runtime_takes(count: int) -> None:
    """Short up to the threshold, long above it."""
    assert_equals_runtime(model("cpu-fp32", "phi3-longrope"), TOKENS[:count])


@pytest.mark.parametrize("kind", GRAPHS)
def test_S2_S3_gpt2_graphs_equal_the_runtimes(tmp_path: Path, kind: str) -> None:
    """Learned positions, layer norms, and a past in one tensor or in two."""
    assert_equals_runtime(write_gpt2(tmp_path / kind, kind))


@pytest.mark.parametrize(
    ("form", "family", "op_type"),
    [("cpu-fp32", "gemma2", "GroupQueryAttention"), ("paged-fp16", "gptoss", "PagedAttention")],
)
def test_S2_case_C14_an_unknown_attribute_is_refused_by_name(
    tmp_path: Path, form: str, family: str, op_type: str
) -> None:
    def add(proto: onnx.ModelProto) -> None:
        set_attribute(node_of(proto, op_type), "mystery", 1)

    with pytest.raises(onnx_import.UnsupportedGraph, match=rf"{op_type} \(node .*'mystery'"):
        load(edited(model(form, family), tmp_path / "copy", add))


# Case C20: tables that are one and tables that are two, whatever the configuration says.


def embed_with_head(proto: onnx.ModelProto) -> None:
    """Embed with the head's codes, as an export does that takes an untied model's tables for one."""
    head = next(node for node in proto.graph.node if node.name == "/lm_head/MatMul_Q4")
    gather = next(node for node in proto.graph.node if node.name == "/model/embed_tokens/Gather")
    rows, columns = head_sizes(head)
    shape = onnx.numpy_helper.from_array(np.array([rows, columns // 2]), "/shape")
    proto.graph.initializer.append(shape)
    nodes = [
        onnx.helper.make_node("Reshape", [head.input[1], shape.name], ["/codes"], name="/codes"),
        onnx.helper.make_node(
            "GatherBlockQuantized", ["/codes", "input_ids", head.input[2]], list(gather.output), name="/embed",
            domain="com.microsoft", bits=4, block_size=32, gather_axis=0, quantize_axis=1,
        ),
    ]  # fmt: skip
    at = list(proto.graph.node).index(gather)
    proto.graph.node.remove(gather)
    for node in reversed(nodes):
        proto.graph.node.insert(at, node)


def head_sizes(head: onnx.NodeProto) -> tuple[int, int]:
    values: dict[str, Any] = {item.name: onnx.helper.get_attribute_value(item) for item in head.attribute}
    return values["N"], values["K"]


@pytest.mark.parametrize(
    ("form", "family"),
    [
        ("cpu-fp32", "qwen2"),
        ("cpu-fp32", "mistral"),
        ("cpu-int4", "qwen2"),
        ("cpu-int4", "mistral"),
        ("cpu-int4", "gemma2"),
        ("cpu-int4", "qwen3_5"),
    ],
)
def test_S3_case_C20_tied_and_untied_tables_equal_the_runtimes(form: str, family: str) -> None:
    """Five tokens, through tied (qwen2, gemma2) and untied files."""
    assert_equals_runtime(model(form, family), TOKENS[:5])


def test_S3_case_C20_tables_that_an_export_took_for_one_are_followed(tmp_path: Path) -> None:
    """An int4 export that embeds with the head of a model whose matrices differ: it is read as it is, wrong or not."""
    source = model("cpu-int4", "mistral")
    shared = edited(source, tmp_path / "shared", embed_with_head)
    expected = assert_equals_runtime(shared, TOKENS[:5])
    untied = Reference(source).logits(TOKENS[:5])
    assert np.abs(untied - expected).max() > 0.1 * np.abs(untied).max()
