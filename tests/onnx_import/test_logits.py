"""S1, S3: logits of every family and form against ONNX Runtime on the same file."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import FAMILIES, edited, logits, model, runtime_logits, set_attribute

TOKENS = np.random.default_rng(0).integers(3, 320, 48).astype(np.int32)


def load(folder: Path, weights: onnx_import.WeightMode = "exact") -> onnx_import.Decoder:
    return onnx_import.import_decoder(onnx_import.read_folder(folder), weights)


def float_activations(proto: onnx.ModelProto) -> None:
    """Have ONNX Runtime multiply int4 weights with float32 activations, not with int8 ones."""
    for node in proto.graph.node:
        if node.op_type == "MatMulNBits":
            set_attribute(node, "accuracy_level", 1)


def relative(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.abs(actual - expected) / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_S3_fp32_logits_equal_the_runtimes(family: str) -> None:
    """S1, S3. The bound is a tenth of a thousandth; about 3e-6 is seen."""
    folder = model("cpu-fp32", family)
    assert relative(logits(load(folder), TOKENS), runtime_logits(folder, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_S3_exact_int4_logits_equal_the_runtimes_with_float_activations(tmp_path: Path, family: str) -> None:
    """S3, case C20: tied (qwen2) and untied int4 files, on a copy of the file with accuracy_level 1."""
    folder = edited(model("cpu-int4", family), tmp_path / "copy", float_activations)
    assert relative(logits(load(folder), TOKENS), runtime_logits(folder, TOKENS)).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_S3_fast_int4_logits_are_near_the_exact_ones(family: str) -> None:
    """S3. Rounding a weight row to 8 bits moves each weight by at most 1/254 of the row's peak.

    These models are 64 wide with spread-out logits, so errors average over few terms and attention amplifies
    them: about 0.5% of the logit scale on average and 10% at worst is seen.
    """
    folder = model("cpu-int4", family)
    difference = relative(logits(load(folder, "fast"), TOKENS), logits(load(folder), TOKENS))
    assert 0 < difference.mean() < 0.01
    assert difference.max() < 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_S3_packed_fp16_logits_are_near_the_fp32_export_of_the_same_weights(family: str) -> None:
    """S1, S3. Half precision rounds by 2**-11 = 0.0005 relative; some twenty roundings a layer add up as a walk."""
    expected = runtime_logits(model("cpu-fp32", family), TOKENS)
    difference = relative(logits(load(model("paged-fp16", family)), TOKENS), expected)
    assert difference.mean() < 2**-11 * np.sqrt(2 * 20)
    assert difference.max() < 0.02


@pytest.mark.parametrize("form", ["cpu-fp32", "cpu-int4", "paged-fp16"])
def test_G3_selected_rows_equal_those_of_the_whole(form: str) -> None:
    """G3: rows in any order, repeated or not, are those of the full logits."""
    decoder = load(model(form, "qwen3"))
    rows = np.array([7, 3, 3, 47, 0])
    np.testing.assert_array_equal(logits(decoder, TOKENS, rows), logits(decoder, TOKENS)[rows])


def test_geometry_follows_the_graph() -> None:
    """S1: three query heads a key head, the scale attribute, dtype of keys, layers in order."""
    layers = load(model("paged-fp16")).layers
    assert [spec.layer for spec in layers] == [0, 1]
    spec = layers[0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (6, 2, 16, 0.25)
    assert spec.kv_dtype == np.float16


@pytest.mark.parametrize(("family", "sources"), [("qwen2", 1), ("mistral", 2)])
def test_case_C20_the_graph_alone_says_what_is_shared(family: str, sources: int) -> None:
    """Case C20: a tied table and head come from one tensor of the file, untied ones from two."""
    tensors = load(model("cpu-fp32", family)).plan.tensors
    assert len({tensor.source for tensor in tensors if tensor.nbytes == 320 * 64 * 4}) == sources
