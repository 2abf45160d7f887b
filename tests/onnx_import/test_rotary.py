"""S2, S3: rotary embedding and head splitting inside and outside the attention operators."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_import
from onnx_import.graph import Node
from onnx_import.ops import REGISTRY
from onnx_import.ops.embedding import rotate
from onnx_import.registry import Environment, resolve
from tests.onnx_import.attention_edits import rotate_outside
from tests.onnx_import.reference import (
    edited,
    logits,
    model,
    run_node,
    runtime_logits,
    set_attribute,
)

TOKENS = np.random.default_rng(1).integers(3, 320, 24).astype(np.int32)


@settings(max_examples=20)
@given(
    heads=st.integers(1, 4),
    half=st.sampled_from([8, 16]),
    kept=st.sampled_from([0, 16]),
    interleaved=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_S3_rotation_equals_the_runtimes(
    heads: int, half: int, kept: int, interleaved: bool, seed: int
) -> None:
    """S3: both pairings, whole and partial rotation, positions in any order."""
    random = np.random.default_rng(seed)
    head_dim, tokens = 2 * half + kept, 5
    x = random.standard_normal((1, tokens, heads * head_dim), np.float32)
    positions = random.permutation(32)[None, :tokens].astype(np.int64)
    angles = random.uniform(-3, 3, (32, half)).astype(np.float32)
    caches = {"cos": np.cos(angles), "sin": np.sin(angles)}
    node = onnx.helper.make_node(
        "RotaryEmbedding", ["x", "ids", "cos", "sin"], ["y"], domain="com.microsoft",
        interleaved=int(interleaved), num_heads=heads, rotary_embedding_dim=2 * half,
    )  # fmt: skip
    expected = run_node(node, {"x": x, "ids": positions}, caches).reshape(tokens, heads, head_dim)
    turned = rotate(
        jnp.asarray(x.reshape(tokens, heads, head_dim)),
        jnp.asarray(positions[0].astype(np.int32)),
        jnp.asarray(caches["cos"]),
        jnp.asarray(caches["sin"]),
        interleaved=interleaved,
    )
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def interleave(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            set_attribute(node, "rotary_interleaved", 1)


def implicit_scale(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            set_attribute(node, "scale", 0.0)


def without_heads(proto: onnx.ModelProto) -> None:
    """What exports write where whole heads are rotated: no number of heads, the cache is as wide as one."""
    rotate_outside(proto, num_heads=0)


def by_three_streams(proto: onnx.ModelProto) -> None:
    """M-RoPE: positions [3, batch, tokens], which are equal for text."""
    rotate_outside(proto, "MRotaryEmbedding", mrope_section=[4, 2, 2], mrope_layout=1)


def plain_by_three_streams(proto: onnx.ModelProto) -> None:
    """What Qwen3.5's exports hold: RotaryEmbedding on three streams."""
    by_three_streams(proto)
    for node in proto.graph.node:
        if node.op_type == "MRotaryEmbedding":
            node.op_type = "RotaryEmbedding"
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("num_heads", 0))


@pytest.mark.parametrize("edit", [interleave, implicit_scale])
def test_S3_attention_attributes_are_honoured(tmp_path: Path, edit) -> None:  # type: ignore[no-untyped-def]
    """S3: interleaved rotary pairs, and scale 0 meaning 1 / sqrt(head_dim)."""
    folder = edited(model("cpu-fp32"), tmp_path / "copy", edit)
    expected = runtime_logits(folder, TOKENS)
    actual = logits(onnx_import.import_decoder(onnx_import.read_folder(folder)), TOKENS)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("edit", [rotate_outside, without_heads, by_three_streams, plain_by_three_streams])
def test_S3_G1_rotation_outside_attention_gives_the_same_logits(tmp_path: Path, edit) -> None:  # type: ignore[no-untyped-def]
    """S2, S3: by position_ids, as exports without fused rotation have it; G1: M-RoPE's text positions, three times."""
    folder = edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", edit)
    outside = onnx_import.import_decoder(onnx_import.read_folder(folder))
    inside = onnx_import.import_decoder(onnx_import.read_folder(model("cpu-fp32", "qwen3")))
    np.testing.assert_allclose(logits(outside, TOKENS), logits(inside, TOKENS), atol=1e-5)


def test_S2_positions_of_another_shape_are_refused(tmp_path: Path) -> None:
    def two_streams(proto: onnx.ModelProto) -> None:
        rotate_outside(proto)
        proto.graph.input[-1].type.tensor_type.shape.dim[0].dim_value = 2

    folder = edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", two_streams)
    with pytest.raises(onnx_import.UnsupportedGraph, match=r"'position_ids' has the shape \[2, None\]"):
        onnx_import.import_decoder(onnx_import.read_folder(folder))


def test_S3_query_and_key_norms_inside_attention(tmp_path: Path) -> None:
    """S2, S3: the fused form of qwen3's norms equals the spelled-out one that the builder writes for CPU."""

    def fuse(proto: onnx.ModelProto) -> None:
        producers = {name: node for node in proto.graph.node for name in node.output}
        for node in proto.graph.node:
            if node.op_type == "GroupQueryAttention":
                norms = []
                for index in (0, 1):
                    norm = producers[producers[node.input[index]].input[0]]
                    norms.append(norm.input[1])
                    node.input[index] = producers[norm.input[0]].input[0]
                node.input.extend(["", "", *norms])
                set_attribute(node, "qk_norm_epsilon", 1e-6)

    folder = edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", fuse)
    fused = onnx_import.import_decoder(onnx_import.read_folder(folder))
    spelled = onnx_import.import_decoder(onnx_import.read_folder(model("cpu-fp32", "qwen3")))
    np.testing.assert_allclose(logits(fused, TOKENS), logits(spelled, TOKENS), atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [([5, 6, 327], [0, 1, 2]), ([5, 6, 7], [0, 1, 512])],
    ids=["token past the table", "position past the cache"],
)
def test_indices_past_a_table_are_not_clamped(tokens: list[int], positions: list[int]) -> None:
    """Sibling of case C1: JAX clamps silently by default; here such a row becomes NaN, and only that row."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(model("cpu-fp32")))

    def own_query(spec, query, key, value):  # type: ignore[no-untyped-def]
        return query, None

    arrays = [jnp.asarray(values, jnp.int32) for values in (tokens, positions)]
    result = np.asarray(decoder.apply(decoder.params, *arrays, own_query, jnp.arange(3))[0])
    assert np.isfinite(result[:2]).all()
    assert np.isnan(result[2]).all()


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_S3_G1_three_equal_streams_equal_the_runtimes(layout: int, rank: int) -> None:
    """The fused operator of vision-language models on text: sections and their layout change nothing."""
    random = np.random.default_rng(layout)
    heads, tokens, half = 2, 5, 8
    x = random.standard_normal((1, heads, tokens, 2 * half), np.float32)
    x = x if rank == 4 else x.transpose(0, 2, 1, 3).reshape(1, tokens, -1)
    positions = np.tile(random.permutation(32)[None, None, :tokens], (3, 1, 1)).astype(np.int64)
    angles = random.uniform(-3, 3, (32, half)).astype(np.float32)
    feed = {"x": x, "ids": positions, "cos": np.cos(angles), "sin": np.sin(angles)}
    node = onnx.helper.make_node(
        "MRotaryEmbedding", list(feed), ["y"], domain="com.microsoft",
        num_heads=heads, mrope_section=[4, 2, 2], mrope_layout=layout,
    )  # fmt: skip
    expected = run_node(node, feed, {})
    operator = REGISTRY.find("com.microsoft", "MRotaryEmbedding", 1)
    assert operator is not None
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    parsed = Node("com.microsoft", "MRotaryEmbedding", "one", tuple(feed), ("y",), attributes)
    problems: list[str] = []
    call = resolve(operator, parsed, {}, 0, problems)
    names = ("input", "position_ids", "cos_cache", "sin_cache")
    args = dict(zip(names, map(jnp.asarray, feed.values()), strict=True))
    (actual,) = operator.run(call, args, Environment(jnp.arange(tokens), None))  # type: ignore[arg-type]
    assert not problems
    np.testing.assert_allclose(actual, expected, atol=1e-6)
