"""S1, S2: packed bfloat16 exports, made from the float16 ones by rounding every weight."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import logits, model
from tests.onnx_import.test_exactness import own_token_attention

TOKENS = np.random.default_rng(0).integers(3, 300, 24).astype(np.int32)


def rounded(source: Path, target: Path) -> Path:
    """A copy of a packed folder with bfloat16 where it had float16, weights in external data."""
    target.mkdir()
    for name in ("genai_config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    proto = onnx.load(source / "model.onnx")
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16:
            narrow = onnx.numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(narrow, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    onnx.save_model(proto, target / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[onnx_import.Decoder, onnx_import.Decoder]:
    source = model("paged-fp16", "qwen3")
    folder = rounded(source, tmp_path_factory.mktemp("bfloat16") / "model")
    return tuple(onnx_import.import_decoder(onnx_import.read_folder(path)) for path in (source, folder))


def test_S3_logits_stay_within_rounding_of_the_float16_export(
    pair: tuple[onnx_import.Decoder, onnx_import.Decoder],
) -> None:
    """S3: bfloat16 keeps 8 bits of a number; over two layers that is a few per cent of the largest logit."""
    expected, found = (logits(decoder, TOKENS) for decoder in pair)
    assert pair[1].layers[0].kv_dtype == ml_dtypes.bfloat16
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.8


def test_E6_bfloat16_logits_have_the_same_bits_in_any_company(
    pair: tuple[onnx_import.Decoder, onnx_import.Decoder],
) -> None:
    """E6: as in float32, with the last layers on 2 rows or on all."""
    decoder = pair[1]
    run = jax.jit(
        lambda params, tokens, rows: decoder.apply(params, tokens, tokens, own_token_attention, rows)[0]
    )
    rows = np.arange(24, dtype=np.int32)
    whole = np.asarray(run(decoder.params, TOKENS, rows))
    np.testing.assert_array_equal(run(decoder.params, TOKENS[-2:], rows[:2]), whole[-2:])
