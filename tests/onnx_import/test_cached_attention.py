"""S2, S3: decoders that keep their cache with other attention operators, against ONNX Runtime on the same graph."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_import
from tests.onnx_import.reference import logits

VOCAB, HIDDEN, HEADS, LAYERS = 64, 32, 4, 2
HEAD_DIM = HIDDEN // HEADS
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 11).astype(np.int32)
Parts = tuple[list[onnx.NodeProto], dict[str, np.ndarray], str]
"""Nodes of one layer's attention, their constants, and the name of its output [1, tokens, hidden]."""


def node(
    op_type: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes
) -> onnx.NodeProto:  # type: ignore[no-untyped-def]
    return onnx.helper.make_node(op_type, inputs, outputs, name=f"/{outputs[0]}", domain=domain, **attributes)


def projections(x: str, layer: int, random: np.random.Generator, kv_heads: int) -> Parts:
    """q, k and v of one layer."""
    nodes, constants = [], {}
    for kind, width in (("q", HIDDEN), ("k", kv_heads * HEAD_DIM), ("v", kv_heads * HEAD_DIM)):
        constants[f"w{kind}.{layer}"] = random.normal(0, 0.3, (HIDDEN, width)).astype(np.float32)
        nodes.append(node("MatMul", [x, f"w{kind}.{layer}"], [f"{kind}.{layer}"]))
    return nodes, constants, ""


def fused(x: str, layer: int, random: np.random.Generator) -> Parts:
    """GPT-2's: projection inside, past and present as one tensor, the padding mask cast."""
    constants = {
        f"qkv.{layer}": random.normal(0, 0.3, (HIDDEN, 3 * HIDDEN)).astype(np.float32),
        f"bias.{layer}": random.normal(0, 0.3, 3 * HIDDEN).astype(np.float32),
    }
    mask, out = f"mask.{layer}", f"attention.{layer}"
    nodes = [
        node("Cast", ["attention_mask"], [mask], to=onnx.TensorProto.INT32),
        node(
            "Attention", [x, *constants, mask, f"past_{layer}"], [out, f"present_{layer}"], "com.microsoft",
            num_heads=HEADS, unidirectional=1,
        ),
    ]  # fmt: skip
    return nodes, constants, out


def multi_head(x: str, layer: int, random: np.random.Generator) -> Parts:
    nodes, constants, _ = projections(x, layer, random, HEADS)
    constants[f"bias.{layer}"] = random.normal(0, 0.3, 3 * HIDDEN).astype(np.float32)
    inputs = [f"{kind}.{layer}" for kind in "qkv"] + [f"bias.{layer}", "", ""]
    outputs = [f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"]
    past = [f"past.{layer}.key", f"past.{layer}.value"]
    attributes = {"num_heads": HEADS, "unidirectional": 1, "scale": 0.4}
    nodes.append(node("MultiHeadAttention", inputs + past, outputs, "com.microsoft", **attributes))
    return nodes, constants, outputs[0]


def standard(x: str, layer: int, random: np.random.Generator) -> Parts:
    """ONNX's own Attention with grouped heads."""
    nodes, constants, _ = projections(x, layer, random, HEADS // 2)
    inputs = [f"{kind}.{layer}" for kind in "qkv"]
    outputs = [f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"]
    past = [f"past.{layer}.key", f"past.{layer}.value"]
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS // 2}
    nodes.append(
        node("Attention", [*inputs, "", *past], outputs, is_causal=1, softcap=2.0, scale=0.4, **heads)
    )
    return nodes, constants, outputs[0]


def write(folder: Path, attention: Callable[..., Parts], opset: int = 23) -> Path:
    """A model folder of a small decoder around an attention, with its past and present as graph inputs and outputs."""
    random = np.random.default_rng(0)
    constants = {
        "embedding": random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32),
        "head": random.normal(0, 0.3, (HIDDEN, VOCAB)).astype(np.float32),
    }
    nodes, x = [node("Gather", ["embedding", "input_ids"], ["x.0"])], "x.0"
    for layer in range(LAYERS):
        more, weights, out = attention(x, layer, random)
        nodes += [*more, node("Add", [x, out], [f"x.{layer + 1}"])]
        constants |= weights
        x = f"x.{layer + 1}"
    nodes.append(node("MatMul", [x, "head"], ["logits"]))
    value = onnx.helper.make_tensor_value_info
    produced = [name for item in nodes for name in item.output if name.startswith("present")]
    read = [name for item in nodes for name in item.input if name.startswith("past")]
    one = attention is fused
    heads = HEADS if attention in (fused, multi_head) else HEADS // 2
    cache = [2, 1, heads, "past", HEAD_DIM] if one else [1, heads, "past", HEAD_DIM]
    graph = onnx.helper.make_graph(
        nodes, "decoder",
        [value(name, onnx.TensorProto.INT64, [1, name]) for name in ("input_ids", "attention_mask")]
        + [value(name, onnx.TensorProto.FLOAT, cache) for name in read],
        [value(name, onnx.TensorProto.FLOAT, None) for name in ("logits", *produced)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    folder.mkdir()
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    inputs = {"past_key_names": "past_%d" if one else "past.%d.key"}
    decoder = {"filename": "model.onnx", "num_hidden_layers": LAYERS, "inputs": inputs, "outputs": {}}
    model = {"type": "test", "vocab_size": VOCAB, "context_length": 64, "eos_token_id": 2, "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": model}))
    return folder


def expected_logits(folder: Path) -> np.ndarray:
    """ONNX Runtime's logits, the last token as a step of its own behind the others' past."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    past = {
        value.name: np.zeros([0 if size == "past" else size for size in value.shape], np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    rows = []
    for span in (TOKENS[:-1], TOKENS[-1:]):
        seen = sum(map(len, rows)) + len(span)
        feed = {"input_ids": span[None].astype(np.int64), "attention_mask": np.ones((1, seen), np.int64)}
        names = {value.name for value in session.get_inputs()}
        output, *presents = session.run(None, {k: v for k, v in (feed | past).items() if k in names})
        past = dict(zip(past, presents, strict=True))
        rows.append(output[0])
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("attention", "opset"), [(fused, 21), (multi_head, 21), (standard, 23), (standard, 24)]
)
def test_S2_S3_other_cached_attentions_equal_the_runtimes(tmp_path: Path, attention, opset: int) -> None:  # type: ignore[no-untyped-def]
    """GPT-2's fused one with past as one tensor, MultiHeadAttention, and the standard one of both opsets."""
    folder = write(tmp_path / "model", attention, opset)
    expected = expected_logits(folder)
    decoder = onnx_import.import_decoder(onnx_import.read_folder(folder))
    assert [spec.layer for spec in decoder.layers] == [0, 1]
    np.testing.assert_allclose(logits(decoder, TOKENS), expected, atol=2e-5 * np.abs(expected).max())


def refusals(folder: Path, edit: Callable[[onnx.ModelProto], None]) -> tuple[str, ...]:
    proto = onnx.load(folder / "model.onnx")
    edit(proto)
    onnx.save(proto, folder / "model.onnx")
    with pytest.raises(onnx_import.UnsupportedGraph) as caught:
        onnx_import.import_decoder(onnx_import.read_folder(folder))
    return caught.value.problems


def attentions(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [item for item in proto.graph.node if "Attention" in item.op_type]


@pytest.mark.parametrize(
    ("attention", "attribute"),
    [(fused, "unidirectional"), (multi_head, "unidirectional"), (standard, "is_causal")],
)
def test_S2_attention_that_is_not_causal_is_refused(tmp_path: Path, attention, attribute: str) -> None:  # type: ignore[no-untyped-def]
    def change(proto: onnx.ModelProto) -> None:
        for item in attentions(proto):
            kept = [value for value in item.attribute if value.name != attribute]
            del item.attribute[:]
            item.attribute.extend(kept)

    found = refusals(write(tmp_path / "model", attention), change)
    assert len(found) == LAYERS
    assert all(f"{attribute}=0" in problem and "/attention." in problem for problem in found)


@pytest.mark.parametrize(
    ("attention", "index", "name"),
    [
        (fused, 3, "mask_index"),
        (fused, 5, "attention_bias"),
        (multi_head, 4, "key_padding_mask"),
        (multi_head, 5, "attention_bias"),
        (standard, 3, "attn_mask"),
    ],
)
def test_S2_masks_of_other_kinds_are_refused_by_name(
    tmp_path: Path, attention, index: int, name: str
) -> None:  # type: ignore[no-untyped-def]
    def change(proto: onnx.ModelProto) -> None:
        mask = onnx.helper.make_tensor_value_info("own_mask", onnx.TensorProto.FLOAT, [1, 1, "s", "t"])
        proto.graph.input.append(mask)
        item = attentions(proto)[0]
        item.input.extend([""] * (index + 1 - len(item.input)))
        item.input[index] = "own_mask"

    (problem,) = refusals(write(tmp_path / "model", attention), change)
    assert f"{name!r} ('own_mask')" in problem


@pytest.mark.parametrize("attention", [fused, multi_head, standard])
def test_S2_case_C14_a_cache_that_two_nodes_share_is_refused(tmp_path: Path, attention) -> None:  # type: ignore[no-untyped-def]
    """Sibling of case C14: keys of another layer, as gemma3n reads them, are named."""

    def change(proto: onnx.ModelProto) -> None:
        first, second = attentions(proto)
        for index, name in enumerate(first.input):
            if name.startswith("past"):
                second.input[index] = name

    found = refusals(write(tmp_path / "model", attention), change)
    assert any(
        "/attention.1') reads the cache of layer 0, as another node does" in problem for problem in found
    )


def test_S2_unequal_widths_are_refused_with_the_node(tmp_path: Path) -> None:
    """Values narrower than keys fit no cache of this engine."""

    def narrow(x: str, layer: int, random: np.random.Generator) -> Parts:
        nodes, constants, out = standard(x, layer, random)
        constants[f"wv.{layer}"] = constants[f"wv.{layer}"][:, ::2]
        return nodes, constants, out

    with pytest.raises(onnx_import.UnsupportedGraph, match=r"/attention.0.*heads of query, key and value"):
        onnx_import.import_decoder(onnx_import.read_folder(write(tmp_path / "model", narrow)))
