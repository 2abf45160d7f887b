"""The converted folder: its weights, its logits in ONNX Runtime, its tokens in ONNX Runtime GenAI, its memory."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai
import pytest

from jaxengine.demo.convert import convert
from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.gguf_reader import LlamaShape, interleaved_to_halves, read_gguf
from jaxengine.demo.onnx_writer import rotary_caches
from jaxengine.demo.progress import silent
from tests.demo import synthetic as tiny

PROMPT = [1, 40, 77, 5, 5, 130, 2, 9, 261]


def initializers(folder: Path) -> dict[str, np.ndarray]:
    model = onnx.load(folder / "model.onnx")
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def matmul_weight(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The float zero-point arithmetic of MatMulNBits, written out here on its own."""
    packed, scales = stored[f"{name}.MatMul.weight_Q4"], stored[f"{name}.MatMul.weight_scales"]
    zeros = stored[f"{name}.MatMul.weight_zero_points"]
    out = np.empty((*scales.shape, 32), np.float32)
    for place in range(32):
        nibble = packed[..., place // 2] >> (4 * (place % 2)) & 15
        out[..., place] = (nibble.astype(np.float32) - zeros) * scales
    return out.reshape(len(packed), -1)


def test_weights_in_the_file_are_ggufs(tiny_gguf, tiny_folder):
    source, stored = tiny.gguf_weights(tiny_gguf), initializers(tiny_folder)
    heads = {"attn_q": tiny.HEADS, "attn_k": tiny.KV_HEADS}
    places = {
        "attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
        "attn.o_proj": ("attn_output",),
        "mlp.gate_proj": ("ffn_gate",),
        "mlp.up_proj": ("ffn_up",),
        "mlp.down_proj": ("ffn_down",),
    }
    for layer in range(tiny.LAYERS):
        for place, names in places.items():
            parts = []
            for name in names:
                part = source[f"blk.{layer}.{name}.weight"]
                parts.append(
                    part[interleaved_to_halves(heads[name], tiny.HEAD_DIM)] if name in heads else part
                )
            expected = np.concatenate(parts)
            made = matmul_weight(stored, f"model.layers.{layer}.{place}")
            np.testing.assert_allclose(made, expected, rtol=0, atol=2.0**-23 * np.abs(expected).max())
    head = stored["lm_head.MatMul.weight_Q8"].astype(np.float32) - 128
    head *= stored["lm_head.MatMul.weight_scales"][..., None]
    np.testing.assert_array_equal(head.reshape(len(head), -1), source["token_embd.weight"])
    np.testing.assert_array_equal(
        stored["model.layers.1.input_layernorm.weight"], source["blk.1.attn_norm.weight"]
    )


def run_onnx(folder: Path, chunks: list[list[int]]) -> np.ndarray:
    """Logits of all tokens, fed chunk by chunk through the caches."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    past = {
        value.name: np.zeros((1, tiny.KV_HEADS, 0, tiny.HEAD_DIM), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    logits, length = [], 0
    for chunk in chunks:
        length += len(chunk)
        feed = {"input_ids": np.array([chunk]), "attention_mask": np.ones((1, length), np.int64)}
        outputs = dict(zip(names, session.run(None, feed | past), strict=True))
        logits.append(outputs["logits"][0])
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return np.concatenate(logits)


@pytest.mark.parametrize("chunks", [[PROMPT], [PROMPT[:6], *([token] for token in PROMPT[6:])]])
def test_logits_in_onnx_runtime_are_those_of_llama_in_numpy(tiny_gguf, tiny_folder, chunks):
    expected = tiny.numpy_logits(tiny.gguf_weights(tiny_gguf), PROMPT)
    made = run_onnx(tiny_folder, chunks)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_onnx_runtime_genai_runs_the_folder_greedily(tiny_gguf, tiny_folder):
    weights, tokens = tiny.gguf_weights(tiny_gguf), list(PROMPT)
    for _ in range(12):
        tokens.append(int(tiny.numpy_logits(weights, tokens)[-1].argmax()))
    assert not {0, 2} & set(tokens[len(PROMPT) :])  # no end token cuts the comparison short
    model = onnxruntime_genai.Model(str(tiny_folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(tokens))
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    while not generator.is_done():
        generator.generate_next_token()
    assert [int(token) for token in generator.get_sequence(0)] == tokens


def test_genai_config_states_what_the_gguf_file_says(tiny_folder):
    config = json.loads((tiny_folder / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [2, 0]
    assert config["model"]["vocab_size"] == len(tiny.TOKENS)
    assert config["model"]["context_length"] == config["search"]["max_length"] == tiny.CONTEXT
    graph = onnx.load(tiny_folder / "model.onnx", load_external_data=False).graph
    norms = [node for node in graph.node if "SimplifiedLayerNormalization" in node.op_type]
    epsilons = {onnx.helper.get_node_attr_value(node, "epsilon") for node in norms}
    assert epsilons == {np.float32(tiny.EPSILON)}


def test_external_data_is_aligned_and_disjoint(tiny_folder):
    graph = onnx.load(tiny_folder / "model.onnx", load_external_data=False).graph
    entries = [{e.key: e.value for e in tensor.external_data} for tensor in graph.initializer]
    spans = sorted((int(entry["offset"]), int(entry["length"])) for entry in entries)
    assert {entry["location"] for entry in entries} == {"model.onnx.data"}
    assert all(offset % 64 == 0 for offset, _ in spans)
    ends = [offset + length for offset, length in spans]
    assert all(end <= start for end, (start, _) in zip(ends[:-1], spans[1:], strict=True))
    assert ends[-1] == (tiny_folder / "model.onnx.data").stat().st_size


def test_weights_are_written_without_being_held(tmp_path):
    """Peak memory is a few layers' worth, not the model's."""
    gguf = tiny.write_tiny_gguf(tmp_path / "wide.gguf", layers=24, intermediate=8192)
    folder = tmp_path / "wide"
    folder.mkdir()
    tracemalloc.start()
    convert(gguf, folder, silent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.3 * (folder / "model.onnx.data").stat().st_size


def test_rotary_caches_are_cosines_and_sines_of_the_positions():
    shape = LlamaShape(1, 1, 1, 32, 32, 32, 32, 50, 10000.0, 1e-5)
    angles = np.outer(np.arange(50), 10000.0 ** (-np.arange(16) / 16))
    cosines, sines = rotary_caches(shape)
    assert cosines.dtype == sines.dtype == np.float32
    np.testing.assert_allclose(cosines, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sines, np.sin(angles), atol=1e-5)


def test_a_missing_tensor_is_named(tiny_gguf):
    model = read_gguf(tiny_gguf)
    with pytest.raises(DemoModelError, match=r"Tensor output\.weight is missing"):
        model.tensor("output.weight", "Q8_0")
    with pytest.raises(DemoModelError, match=r"output_norm\.weight is stored as F32 .* Q4_1 is needed"):
        model.tensor("output_norm.weight", "Q4_1")


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(b"not a model at all, but long enough to be looked at")
    with pytest.raises(DemoModelError, match=r"other\.gguf can't be read as a GGUF file"):
        read_gguf(path)


def test_a_truncated_gguf_is_refused_by_name(tiny_gguf, tmp_path):
    path = tmp_path / "half.gguf"
    data = tiny_gguf.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DemoModelError, match=r"half\.gguf can't be read as a GGUF file"):
        read_gguf(path)
