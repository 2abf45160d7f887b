"""S2, S3, C14: whole graphs with windows, soft caps and sinks, in both forms, against ONNX Runtime on the 2-D one."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.attention_edits import cap, sink, window_first_layer
from tests.onnx_import.reference import edited, logits, model, runtime_logits

TOKENS = np.random.default_rng(4).integers(3, 320, 40).astype(np.int32)


@pytest.mark.parametrize("edit", [window_first_layer, cap, sink])
def test_S3_case_C14_logits_equal_the_runtimes_in_both_forms(tmp_path: Path, edit) -> None:  # type: ignore[no-untyped-def]
    """Single precision within a tenth of a thousandth; half precision within the walk of its roundings."""
    folders = {form: edited(model(form), tmp_path / form, edit) for form in ("cpu-fp32", "paged-fp16")}
    expected = runtime_logits(folders["cpu-fp32"], TOKENS)
    plain = runtime_logits(model("cpu-fp32"), TOKENS)
    assert np.abs(plain - expected).max() > 0.1 * np.abs(expected).max()
    for form, mean, worst in (("cpu-fp32", 1e-5, 1e-4), ("paged-fp16", 2**-11 * np.sqrt(2 * 20), 0.03)):
        actual = logits(onnx_import.import_decoder(onnx_import.read_folder(folders[form])), TOKENS)
        difference = np.abs(actual - expected) / np.abs(expected).max()
        assert difference.mean() < mean
        assert difference.max() < worst


def test_S1_the_geometry_names_window_and_soft_cap(tmp_path: Path) -> None:
    def both(proto: onnx.ModelProto) -> None:
        window_first_layer(proto)
        cap(proto)

    folder = edited(model("paged-fp16"), tmp_path / "copy", both)
    layers = onnx_import.import_decoder(onnx_import.read_folder(folder)).layers
    assert [(spec.window, spec.softcap) for spec in layers] == [(8, 3.0), (None, 3.0)]


def test_S3_rotary_tables_are_taken_as_they_are(tmp_path: Path) -> None:
    """Linear, llama3 and yarn scaling differ in their tables only, and any tables give the same logits."""

    def scale(proto: onnx.ModelProto) -> None:
        random = np.random.default_rng(0)
        frequencies = random.uniform(0.01, 1, 8)
        angles = np.arange(512)[:, None] * frequencies
        for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
            index = next(i for i, t in enumerate(proto.graph.initializer) if t.name == name)
            table = (1.2 * function(angles)).astype(np.float32)
            proto.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(table, name))

    folder = edited(model("cpu-fp32"), tmp_path / "copy", scale)
    expected = runtime_logits(folder, TOKENS)
    actual = logits(onnx_import.import_decoder(onnx_import.read_folder(folder)), TOKENS)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())
