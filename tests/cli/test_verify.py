"""`jaxengine verify`: SPEC S3 and T2, case C20; ONNX Runtime itself is the oracle, so what is tested is the judging."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import jaxengine
import onnx_import
from jaxengine.cli import main
from jaxengine.cli.errors import CommandError
from jaxengine.cli.reference import reference_logits, require_runtime, session_inputs
from jaxengine.cli.verify import compare
from tests.fixtures.gpt2 import write_gpt2
from tests.onnx_import.manifests import HYBRID, graph, manifest, section
from tests.onnx_import.reference import edited, model, runtime_logits

LOGITS = arrays.arrays(np.float32, (3, 4), elements=st.integers(-32, 32).map(lambda n: n / 4))
"""Quarters, whose differences are exact."""


def figures(out: str) -> tuple[float, float]:
    """The absolute and the relative difference that a run printed."""
    absolute = re.search(r"largest difference +(\S+), at position \d+\n", out)
    relative = re.search(r"of the largest logit +(\S+), tolerance", out)
    assert absolute
    assert relative
    return float(absolute[1]), float(relative[1])


@pytest.mark.parametrize(
    ("form", "family"), [("cpu-fp32", "qwen2"), ("cpu-fp32", "mistral"), ("cpu-int4", "qwen2"), ("cpu-int4", "mistral")]
)  # fmt: skip
def test_case_C20_tied_and_untied_exports_are_equal_to_the_runtime(form, family, capsys):
    """Case C20, S3: five tokens through tied (qwen2) and untied files, float and int4."""
    assert main(["verify", str(model(form, family)), "--tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert "5 positions of 320 logits" in out
    assert "all the same" in out
    assert 0 < figures(out)[1] < 1e-4
    assert err == ""


def test_S3_the_packed_form_and_fast_weights_have_their_own_tolerances(capsys):
    """S1, S3: a prompt as text, a 2-D export as reference of the packed one; and weights requantised to int8."""
    against = ["--against", str(model("cpu-fp32", "qwen3"))]
    assert main(["verify", str(model("paged-fp16", "qwen3")), *against, "--prompt", "five!"]) == 0
    out = capsys.readouterr().out
    assert "5 positions" in out
    assert f"{model('cpu-fp32', 'qwen3') / 'model.onnx'}" in out
    assert "tolerance 0.02\n" in out
    assert 1e-4 < figures(out)[1] < 2e-2
    assert main(["verify", str(model("cpu-int4", "qwen3")), "--weights", "fast", "--tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "tolerance 0.15\n" in out
    assert 1e-4 < figures(out)[1] < 0.15


def test_S3_experts_of_8_bits_are_compared_in_float(tmp_path, capsys):
    """ONNX Runtime rounds their activations to 8 bits, which would look like an error of 1e-2."""
    folder = tmp_path / "experts"
    shutil.copytree(model("cpu-int4", "lfm2moe"), folder)
    proto = onnx.load(folder / "model.onnx")
    tensors, changed = {tensor.name: tensor for tensor in proto.graph.initializer}, 0
    for node in proto.graph.node:
        if node.op_type != "QMoE":
            continue
        changed += 1
        for name in (node.input[2], node.input[5]):
            packed = onnx.numpy_helper.to_array(tensors[name])
            halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(halves + np.uint8(120), name))
        for attribute in node.attribute:
            if attribute.name == "expert_weight_bits":
                attribute.i = 8
    assert changed
    (folder / "model.onnx.data").unlink()
    onnx.save(proto, folder / "model.onnx")
    assert main(["verify", str(folder), "--tokens", "20"]) == 0


@pytest.mark.parametrize("family", ["gemma2", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_S3_case_C14_windowed_caches_and_rows_of_positions_are_as_the_runtime_takes_them(family, capsys):
    """A cache with the slots of its window from the start; three rows of positions, of which the kernel takes one."""
    assert main(["verify", str(model("cpu-fp32", family)), "--tokens", "20"]) == 0
    assert 0 < figures(capsys.readouterr().out)[1] < 1e-4


def test_S3_keys_and_values_in_one_tensor_are_filled(tmp_path, capsys):
    """S2: as GPT-2 exports keep them."""
    assert main(["verify", str(write_gpt2(tmp_path / "gpt2", "gpt2-one-past")), "--tokens", "5"]) == 0
    assert 0 < figures(capsys.readouterr().out)[1] < 1e-4


def share_embeddings(proto: onnx.ModelProto) -> None:
    """Have the head multiply by the embedding, as an export that assumes tied weights does."""
    table = next(node.input[0] for node in proto.graph.node if "embed_tokens" in node.name)
    proto.graph.node.insert(0, onnx.helper.make_node("Transpose", [table], ["shared"], perm=[1, 0]))
    head = next(node for node in proto.graph.node if "lm_head" in node.name and node.op_type == "MatMul")
    head.input[1] = "shared"


def test_case_C20_an_export_with_wrongly_shared_embeddings_is_found(tmp_path, capsys):
    """Case C20: the file is followed, so it equals itself; beside the untied export it is far off, and says so."""
    untied = str(model("cpu-fp32", "mistral"))
    shared = str(edited(model("cpu-fp32", "mistral"), tmp_path / "shared", share_embeddings))
    assert main(["verify", shared, "--tokens", "5"]) == 0
    capsys.readouterr()
    assert main(["verify", shared, "--against", untied, "--tokens", "5"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"first differ at position \d: \d+ here, \d+ in the reference", out)
    assert figures(out)[1] > 0.1
    assert re.fullmatch(
        r"jaxengine: error: the logits differ by \S+ of the largest one, above the tolerance of 0.001\n", err
    )
    wide = ["--tolerance", "1000"]
    assert main(["verify", shared, "--against", untied, "--tokens", "5", *wide]) == 0


def test_S3_the_tolerance_is_inclusive_and_can_be_nought(monkeypatch, capsys):
    """S3: equal logits pass at zero, and unequal ones don't."""
    folder = str(model("cpu-fp32"))
    assert main(["verify", folder, "--tokens", "2", "--tolerance", "0"]) == 1
    assert "above the tolerance of 0\n" in capsys.readouterr().err
    monkeypatch.setattr("jaxengine.cli.verify.reference_logits", lambda *_: np.ones((2, 320), np.float32))
    monkeypatch.setattr("jaxengine.cli.verify.engine_logits", lambda *_: np.ones((2, 320), np.float32))
    assert main(["verify", folder, "--tokens", "2", "--tolerance", "0"]) == 0
    monkeypatch.setattr(
        "jaxengine.cli.verify.engine_logits", lambda *_: np.full((2, 320), np.nan, np.float32)
    )
    assert main(["verify", folder, "--tokens", "2", "--tolerance", "9"]) == 1


@given(LOGITS, LOGITS)
def test_S3_the_comparison_is_that_of_single_numbers(ours, theirs):
    found = compare(ours, theirs)
    pairs = {(p, v): abs(float(ours[p, v]) - float(theirs[p, v])) for p in range(3) for v in range(4)}
    assert found.absolute == max(pairs.values())
    assert max(pairs[found.position, v] for v in range(4)) == found.absolute
    scale = max(abs(float(x)) for x in theirs.flat)
    assert found.relative == pytest.approx(found.absolute / scale if scale else found.absolute)
    choices = [(p, int(ours[p].argmax()), int(theirs[p].argmax())) for p in range(3)]
    assert found.flip == next((each for each in choices if each[1] != each[2]), None)


def test_H1_the_runtimes_inputs_follow_from_the_graph():
    """H1: tokens, a mask, MRoPE's positions, caches of no length and fixed state of zeros, for a hybrid graph."""
    of = graph(HYBRID)
    of.inputs["input_ids"] = np.dtype(np.int64), (None, None)
    of.inputs["attention_mask"] = np.dtype(np.int32), (None, None)
    of.inputs["position_ids"] = np.dtype(np.int64), (3, None, None)
    for name in [*of.inputs, *of.outputs]:
        if "key" in name or "value" in name:
            values = of.inputs if name in of.inputs else of.outputs
            values[name] = np.dtype(np.float32), (None, 2, None, None)
    folder = onnx_import.ModelFolder(Path("folder"), None, manifest(section(), of), of)
    specs = [onnx_import.AttentionSpec(layer, 4, 2, 16, 1.0, np.dtype(np.float32)) for layer in (1, 4)]
    model_of_specs = SimpleNamespace(decoder=SimpleNamespace(layers=specs))
    feed = dict(session_inputs(folder, model_of_specs, np.arange(5, 8)))
    assert feed.keys() == of.inputs.keys()
    assert {name: array.dtype for name, array in feed.items()} == {
        name: dtype for name, (dtype, _) in of.inputs.items()
    }
    np.testing.assert_array_equal(feed["input_ids"], [[5, 6, 7]])
    np.testing.assert_array_equal(feed["attention_mask"], [[1, 1, 1]])
    np.testing.assert_array_equal(feed["position_ids"], [[[0, 1, 2]]] * 3)
    states = {name: array for name, array in feed.items() if name.startswith("past")}
    assert not any(array.any() for array in states.values())
    shapes = {"key": (1, 2, 0, 16), "value": (1, 2, 0, 16), "conv": (1, 64, 2), "recurrent": (1, 4, 8, 8)}
    assert {name: array.shape for name, array in states.items()} == {
        name: shapes[name.rsplit(".")[-1]] for name in states
    }


def last_only(proto: onnx.ModelProto) -> None:
    """Give the logits of the last position only, as an export with a pruned head does."""
    proto.graph.node[-1].output[0] = "all"
    bounds = {"start": [-1], "end": [2**31], "axis": [1]}
    for name, values in bounds.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
    proto.graph.node.append(onnx.helper.make_node("Slice", ["all", *bounds], ["logits"]))


def test_S3_a_reference_with_the_last_logits_only_is_run_once_a_position(tmp_path):
    plain, ids = model("cpu-fp32", "qwen2"), np.arange(5, 9)
    pruned = onnx_import.read_folder(edited(plain, tmp_path / "pruned", last_only))
    found = reference_logits(pruned, jaxengine.load_model(plain), ids, require_runtime())
    np.testing.assert_allclose(found, runtime_logits(plain, ids), rtol=1e-4, atol=1e-4)


def quantised_head(proto: onnx.ModelProto) -> None:
    """Give the head 4-bit weights in front of a MatMul, which the runtime takes for one operator."""
    node = proto.graph.node[-1]
    codes = onnx.helper.make_tensor(
        "codes", onnx.TensorProto.INT4, [96, 320], np.arange(96 * 320) * 7 % 16 - 8
    )
    steps = onnx.numpy_helper.from_array(np.full((3, 320), 0.02, np.float32), "steps")
    proto.graph.initializer.extend([codes, steps])
    made = onnx.helper.make_node("DequantizeLinear", ["codes", "steps"], ["floats"], axis=0, block_size=32)
    node.input[1] = "floats"
    proto.graph.node.insert(len(proto.graph.node) - 1, made)


def test_S3_the_reference_rounds_no_activations_beside_4_bit_weights_of_standard_operators(tmp_path, capsys):
    """S3: exports with `use_qdq`; by itself the runtime would multiply in int8, off by a percent or more."""
    folder = edited(model("cpu-fp32"), tmp_path / "copy", quantised_head)
    assert main(["verify", str(folder), "--tokens", "5"]) == 0
    assert figures(capsys.readouterr().out)[1] < 1e-4


def test_T2_a_graph_without_tokens_is_not_called_packed(tmp_path, capsys):
    """T2, case C19: exports without embeddings take vectors in place of tokens."""

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].name = "inputs_embeds"

    folder = edited(model("cpu-fp32"), tmp_path / "copy", change)
    assert main(["verify", str(folder)]) == 1
    assert_one_sentence(capsys, "the graph has no input 'input_ids' of rank 1 or 2")


def test_T2_an_input_that_nobody_knows_is_named(tmp_path, capsys):
    def change(proto: onnx.ModelProto) -> None:
        value = onnx.helper.make_tensor_value_info("odd", onnx.TensorProto.FLOAT, [1])
        proto.graph.input.append(value)

    folder = edited(model("cpu-fp32"), tmp_path / "odd", change)
    assert main(["verify", str(folder), "--tokens", "2"]) == 1
    assert_one_sentence(capsys, "takes the input 'odd', which verify can't fill; compare with another export")


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        ([], 2, "the following arguments are required: FOLDER"),
        (["nowhere"], 1, "The model folder nowhere doesn't exist."),
        ([model("cpu-fp32"), "--against", "nowhere"], 1, "The model folder nowhere doesn't exist."),
        ([model("cpu-fp32"), "--prompt", "a", "--tokens", "3"], 2, "not allowed with argument"),
        ([model("cpu-fp32"), "--prompt", ""], 1, "the prompt is empty; give at least one character"),
        ([model("cpu-fp32"), "--prompt", "\udcff"], 1, "half of a character; give valid Unicode text"),
        ([model("cpu-fp32"), "--tokens", "0"], 2, "'0' is no whole number from 1"),
        ([model("cpu-fp32"), "--tokens", "512"], 1, "the prompt has 512 tokens; give at most 511, one less"),
        ([model("cpu-fp32"), "--tolerance", "-1"], 2, "'-1' is no number from 0 up"),
        ([model("cpu-fp32"), "--tolerance", "nan"], 2, "'nan' is no number from 0 up"),
        ([model("cpu-fp32"), "--tolerance", "tight"], 2, "'tight' is no number from 0 up"),
        (
            [model("paged-fp16")],
            2,
            "holds a packed export, which ONNX Runtime doesn't run here; give --against",
        ),
    ],
)
def test_T2_bad_input_is_one_sentence(words, status, problem, capsys):
    assert main(["verify", *map(str, words)]) == status
    assert_one_sentence(capsys, problem)


def test_T2_a_reference_of_another_width_is_refused(tiny, capsys):
    assert main(["verify", str(tiny), "--against", str(model("cpu-fp32")), "--tokens", "2"]) == 1
    assert_one_sentence(capsys, "wide and those of", "320; give --against an export of the same model")


def test_T2_a_reference_that_the_runtime_cannot_load_says_why(tmp_path, capsys):
    broken = shutil.copytree(model("cpu-fp32"), tmp_path / "broken")
    (broken / "model.onnx.data").write_bytes(b"short")
    assert main(["verify", str(model("cpu-fp32")), "--against", str(broken), "--tokens", "2"]) == 1
    assert_one_sentence(capsys, f"ONNX Runtime can't run {broken / 'model.onnx'}: ")


def test_T2_a_missing_runtime_is_named_before_anything_loads(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["verify", "nowhere"]) == 1
    assert_one_sentence(capsys, "pip install 'jaxengine[verify]'")
    with pytest.raises(CommandError):
        require_runtime()


def test_case_C19_a_search_section_that_the_engine_refuses_does_not_matter(tiny, tmp_path, capsys):
    from tests.cli.tiny_model import variant

    folder = variant(tiny, tmp_path / "beams", {"num_beams": 4, "top_p": "most"})
    assert main(["verify", str(folder), "--tokens", "2"]) == 0
    assert "all the same" in capsys.readouterr().out


def assert_one_sentence(capsys, *parts):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxengine: error: ")
    assert err.count("\n") == 1
    assert not [part for part in parts if part not in err]
