"""S2, S3, C5, C14: each attention operator as one node, against ONNX Runtime on the same node."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_import.graph import Node
from onnx_import.ops import REGISTRY, onnx_attention
from onnx_import.registry import Environment, Operator, resolve
from tests.onnx_import.reference import dense_attention, run_node, run_node_outputs

HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 4, 2, 32, 64


def ours(node: onnx.NodeProto, feed: dict[str, np.ndarray], operator: Operator | None = None) -> np.ndarray:
    """The node's output in the importer, its tokens taken as one sequence from position 0."""
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    parsed = Node(node.domain, node.op_type, "one", tuple(node.input), ("out",), attributes)
    operator = operator or REGISTRY.find(node.domain, node.op_type, 24)
    assert operator is not None
    problems: list[str] = []
    call = resolve(operator, parsed, {}, 0, problems)
    assert not problems
    given = dict(zip((rule.name for rule in operator.inputs), node.input, strict=False))
    args = {
        rule.name: jnp.asarray(feed[given[rule.name]]) if given.get(rule.name) in feed else None
        for rule in operator.inputs
    }
    tokens = feed[node.input[0]].shape[-2]
    return np.asarray(operator.run(call, args, Environment(jnp.arange(tokens), dense_attention))[0])


def grouped(random: np.random.Generator, tokens: int, **options: Any) -> tuple[onnx.NodeProto, dict]:
    """A GroupQueryAttention node of one row without a past, and its inputs."""
    packed, rotary, sinks = (options.pop(name) for name in ("packed", "rotary", "sinks"))
    widths = {"query": HEADS * HEAD_DIM, "key": KV_HEADS * HEAD_DIM, "value": KV_HEADS * HEAD_DIM}
    if packed:
        widths = {"query": sum(widths.values())}
    feed = {
        name: random.standard_normal((1, tokens, width)).astype(np.float32) for name, width in widths.items()
    }
    past = np.zeros((1, KV_HEADS, 0, HEAD_DIM), np.float32)
    feed |= {"past_key": past, "past_value": past}
    feed |= {
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total_sequence_length": np.array(tokens, np.int32),
    }
    if rotary:
        angles = random.uniform(-3, 3, (POSITIONS, rotary)).astype(np.float32)
        feed |= {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    if sinks:
        feed["head_sink"] = random.normal(0, 3, HEADS).astype(np.float32)
    operator = REGISTRY.find("com.microsoft", "GroupQueryAttention", 1)
    assert operator is not None
    inputs = [rule.name if rule.name in feed else "" for rule in operator.inputs][:12]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        inputs,
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=int(bool(rotary)),
        **options,
    )
    return node, feed


@settings(max_examples=15)
@given(
    packed=st.booleans(),
    rotary=st.sampled_from([0, HEAD_DIM // 2, HEAD_DIM // 4]),
    rotary_interleaved=st.integers(0, 1),
    scale=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([0.0, 1.5]),
    local_window_size=st.sampled_from([-1, 1, 3, 4, 5, 32]),
    sinks=st.booleans(),
    smooth_softmax=st.integers(-1, 1),
    tokens=st.sampled_from([1, 35]),
    seed=st.integers(0, 1000),
)
def test_S3_case_C5_grouped_attention_equals_the_runtimes(
    tokens: int, seed: int, sinks: bool, smooth_softmax: int, **options: Any
) -> None:
    """S2, S3: packed or not, rotary whole, partial or none, both pairings, scale, soft cap, window, sinks."""
    smooth_softmax = smooth_softmax if not sinks else -1
    node, feed = grouped(
        np.random.default_rng(seed), tokens, sinks=sinks, smooth_softmax=smooth_softmax, **options
    )
    np.testing.assert_allclose(ours(node, feed), run_node(node, feed, {}), atol=2e-5)


def paged(node: onnx.NodeProto, feed: dict[str, np.ndarray]) -> tuple[onnx.NodeProto, dict]:
    """The PagedAttention node that says the same as a GroupQueryAttention node, and its inputs."""
    packed = {
        name: array.reshape(-1, array.shape[-1]) if name in ("query", "key", "value") else array
        for name, array in feed.items()
    }
    operator = REGISTRY.find("com.microsoft", "PagedAttention", 1)
    assert operator is not None
    inputs = [rule.name if rule.name in feed else "" for rule in operator.inputs]
    twin = onnx.helper.make_node("PagedAttention", inputs, ["out"], domain="com.microsoft")
    twin.attribute.extend(item for item in node.attribute if item.name != "smooth_softmax")
    return twin, packed


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [-1, 4])
def test_S2_both_forms_say_the_same(packed: bool, window: int) -> None:
    """S2: PagedAttention, which ONNX Runtime runs on CUDA only, against GroupQueryAttention here."""
    options = {"local_window_size": window, "softcap": 1.5, "rotary_interleaved": 1, "scale": 0.2}
    node, feed = grouped(np.random.default_rng(0), 6, packed=packed, rotary=8, sinks=True, **options)
    np.testing.assert_array_equal(ours(*paged(node, feed)), ours(node, feed)[0])


@pytest.mark.parametrize("form", ["grouped", "paged"])
@pytest.mark.parametrize(
    ("window", "tokens"), [(4, n) for n in (3, 4, 5, 6)] + [(1, 6), (-1, 6), (6, 6), (7, 6)]
)
def test_case_C5_the_window_includes_the_current_token(form: str, window: int, tokens: int) -> None:
    """Values are one-hot by position, so the output's support is what a query saw."""
    node, feed = grouped(
        np.random.default_rng(0), tokens, packed=False, rotary=0, sinks=False, local_window_size=window
    )
    feed["value"] = np.tile(np.eye(tokens, HEAD_DIM, dtype=np.float32), KV_HEADS)[None]
    seen = [list(range(max(0, p - window + 1) if window > 0 else 0, p + 1)) for p in range(tokens)]
    outputs = [ours(node, feed)[0] if form == "grouped" else ours(*paged(node, feed))]
    if form == "grouped":
        outputs.append(run_node(node, feed, {})[0])
    for output in outputs:
        for head in output.reshape(tokens, HEADS, HEAD_DIM).transpose(1, 0, 2):
            assert [np.flatnonzero(row).tolist() for row in head] == seen


@pytest.mark.parametrize("capacity", [4, 7])
def test_case_C14_a_windowed_cache_only_forgets_what_no_query_sees(capacity: int) -> None:
    """sliding_window_cache=1, stepped through in ONNX Runtime with a cache of W or more slots, equals one full pass."""
    tokens, window = 12, 4
    node, feed = grouped(
        np.random.default_rng(2), tokens, packed=False, rotary=16, sinks=True,
        local_window_size=window, sliding_window_cache=1,
    )  # fmt: skip
    whole, past = ours(node, feed)[0], np.zeros((1, KV_HEADS, capacity, HEAD_DIM), np.float32)
    names = dict.fromkeys(("past_key", "past_value"), past)
    for position in range(tokens):
        step = {name: feed[name][:, position : position + 1] for name in ("query", "key", "value")}
        step |= {
            "seqlens_k": np.array([position], np.int32),
            "total_sequence_length": np.array(position + 1, np.int32),
        }
        output, *presents = run_node_outputs(node, {**feed, **step, **names}, {})
        names = dict(zip(names, presents, strict=True))
        np.testing.assert_allclose(output[0, 0], whole[position], atol=2e-5)


@pytest.mark.parametrize("split", [False, True], ids=["rank 3", "rank 4"])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_S3_the_standard_attention_equals_the_runtimes_in_both_ranks(split: bool, kv_heads: int) -> None:
    """S2, S3: heads side by side, or split off in front of the tokens."""
    random, tokens = np.random.default_rng(kv_heads), 6
    counts = {"Q": HEADS, "K": kv_heads, "V": kv_heads}
    feed = {}
    for name, heads in counts.items():
        x = random.standard_normal((1, heads, tokens, HEAD_DIM)).astype(np.float32)
        feed[name] = x if split else x.transpose(0, 2, 1, 3).reshape(1, tokens, -1)
    past = np.zeros((1, kv_heads, 0, HEAD_DIM), np.float32)
    feed |= {"past_key": past, "past_value": past}
    heads_of = {} if split else {"q_num_heads": HEADS, "kv_num_heads": kv_heads}
    node = onnx.helper.make_node(
        "Attention", ["Q", "K", "V", "", "past_key", "past_value"], ["out", "present_key", "present_value"],
        is_causal=1, **heads_of,
    )  # fmt: skip
    expected = run_node(node, feed, {}, opset=23)
    np.testing.assert_allclose(ours(node, feed, onnx_attention.OPERATORS[0]), expected, atol=2e-5)
