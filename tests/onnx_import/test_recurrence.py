"""S2, S3, C3, E6: convolutions and recurrences with a state, against ONNX Runtime's own kernels."""

from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.onnx_import.one_node import imported, node, runtime
from tests.onnx_import.recurrences import Case, Row

KEY, VALUE = 8, 6
Make = Callable[[int], Row]
"""A row of that many random tokens."""


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    # The shape decides too, so that inputs of one seed aren't each other's beginning.
    random = np.random.default_rng([seed, *shape])
    return (random.standard_normal(shape) * scale).astype(np.float32)


def rates(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers between 0 and 1."""
    return np.random.default_rng([seed, *shape]).uniform(0.05, 0.95, shape).astype(np.float32)


def convolution(
    op_type: str, *, kernel: int = 4, dilation: int = 1, activation: str = "none", bias: bool = True,
    domain: str = "com.microsoft", dtype: Any = np.float32,
) -> tuple[Case, Make]:  # fmt: skip
    """A convolution over 6 channels, channels first or, in its varlen form, tokens first."""
    varlen = op_type.startswith("Varlen")
    constants = {"w": values(6, 1, kernel).astype(dtype)}
    if bias:
        constants["b"] = values(6, seed=1).astype(dtype)
    names = f"x w {'lengths ' if varlen else ''}{'b' if bias else '-'} state"
    attributes = {"dilation": dilation} if dilation > 1 else {}
    proto = node(op_type, names, "Y S", domain, activation=activation, **attributes)
    case = Case(
        proto, constants, (6, (kernel - 1) * dilation), 0 if varlen else 2, 21 if domain else 27, dtype
    )

    def make(count: int) -> Row:
        x = values(count, 6, seed=count).astype(dtype)
        return {"x": x if varlen else x.T[None]}

    return case, make


def linear(
    rule: str, heads: tuple[int, int] = (2, 2), *, per_key: bool = False, shared: bool = False,
    domain: str = "com.microsoft", dtype: Any = np.float32,
) -> tuple[Case, Make]:  # fmt: skip
    """LinearAttention of (query, key) heads; decay an element of keys or a head, beta a head or a token."""
    queries, keys = heads
    names = f"q k v state {'g' if 'gated' in rule else '-'} {'b' if 'delta' in rule else '-'}"
    proto = node(
        "LinearAttention", names, "Y S", domain, q_num_heads=queries, kv_num_heads=keys, update_rule=rule
    )

    def make(count: int) -> Row:
        row = {
            "q": values(1, count, queries * KEY, seed=1),
            "k": values(1, count, keys * KEY, seed=2, scale=KEY**-0.5),
            "v": values(1, count, keys * VALUE, seed=3),
        }
        if "gated" in rule:
            row["g"] = np.log(rates(1, count, keys * (KEY if per_key else 1)))
        if "delta" in rule:
            row["b"] = rates(1, count, 1 if shared else keys, seed=1)
        return {name: array.astype(dtype) for name, array in row.items()}

    return Case(proto, {}, (keys, KEY, VALUE), 1, 21 if domain else 27), make


def delta_net(
    rule: str = "gated_delta", heads: tuple[int, int] = (2, 4), *, per_key: bool = False, dtype: Any = np.float32,
    scale: float = 1.0, **attributes: Any,
) -> tuple[Case, Make]:  # fmt: skip
    """GatedDeltaNet of (key, value) heads, as packed exports have it; queries and keys times `scale`."""
    keys, heads_of_values = heads
    activated = attributes.get("gate_activation", "none") != "none"
    width = (heads_of_values, KEY) if per_key else (heads_of_values,)
    constants = (
        {"a": values(heads_of_values, scale=0.5), "dt": values(*width, seed=1, scale=0.5)}
        if activated
        else {}
    )
    names = f"q k v lengths {'g' if 'gated' in rule else '-'} {'b' if 'delta' in rule else '-'} state"
    proto = node(
        "GatedDeltaNet", names + (" a dt" if activated else ""), "Y S", update_rule=rule, **attributes
    )

    def make(count: int) -> Row:
        row = {
            "q": values(count, keys, KEY, seed=1, scale=scale),
            "k": values(count, keys, KEY, seed=2, scale=scale * KEY**-0.5),
            "v": values(count, heads_of_values, VALUE, seed=3),
        }
        if "gated" in rule:
            row["g"] = values(count, *width, seed=4) if activated else np.log(rates(count, *width))
        if "delta" in rule:
            row["b"] = rates(count, heads_of_values, seed=2)
        return {name: array.astype(dtype) for name, array in row.items()}

    return Case(proto, constants, (heads_of_values, VALUE, KEY), 0), make


def assert_equals_runtime(case: Case, make: Make, tolerance: float = 2e-6) -> None:
    """Output and state of seven tokens from a state that isn't zero."""
    states = values(2, *case.shape).astype(case.dtype)
    row = make(7)
    expected, after = case.runtime([row], states[:1])
    found, found_after = case.packed([row], states, 8)
    assert found.dtype == expected.dtype
    for mine, other in ((found, expected), (found_after[:1], after)):
        mine, other = mine.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance * max(np.abs(other).max(), 1))


@pytest.mark.parametrize("op_type", ["CausalConvWithState", "VarlenCausalConvWithState"])
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"activation": "swish", "dilation": 2, "kernel": 3},
        {"bias": False, "kernel": 2},
        {"activation": "silu", "dtype": np.float16},
    ],
    ids=str,
)
def test_S3_convolutions_equal_the_runtimes(op_type: str, options: Mapping[str, Any]) -> None:
    half = options.get("dtype") is np.float16
    assert_equals_runtime(*convolution(op_type, **options), tolerance=2**-10 if half else 2e-6)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (2, 4)], ids=str)
def test_S3_linear_attention_equals_the_runtimes(rule: str, heads: tuple[int, int]) -> None:
    """All update rules; as many heads of queries as of keys, more of them, and fewer."""
    assert_equals_runtime(*linear(rule, heads))


@pytest.mark.parametrize(
    "options", [{"per_key": True}, {"shared": True}, {"per_key": True, "dtype": np.float16}], ids=str
)
def test_S3_decay_of_each_key_element_and_one_beta_a_token(options: Mapping[str, Any]) -> None:
    half = options.get("dtype") is np.float16
    assert_equals_runtime(*linear("gated_delta", (4, 2), **options), tolerance=2**-10 if half else 2e-6)


@pytest.mark.parametrize("with_beta", [False, True])
def test_S3_the_gate_equals_the_runtimes(with_beta: bool) -> None:
    proto = node("LinearAttentionGate", f"a dt scale {'b' if with_beta else ''}", "Y B" if with_beta else "Y")
    feed = {"a": values(1, 5, 4, scale=3)} | ({"b": values(1, 5, 4, seed=1)} if with_beta else {})
    constants = {"dt": values(4), "scale": -rates(4)}
    found = [output for output in imported(proto, feed, constants) if output is not None]
    for mine, other in zip(found, runtime(proto, feed, constants), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "heads"), [("linear", (2, 2)), ("gated", (1, 3)), ("delta", (2, 4)), ("gated_delta", (2, 4))]
)
def test_S3_delta_nets_equal_the_runtimes(rule: str, heads: tuple[int, int]) -> None:
    """All update rules and ratios of heads, states transposed beside LinearAttention's."""
    assert_equals_runtime(*delta_net(rule, heads))


@pytest.mark.parametrize("per_key", [False, True], ids=["a head", "an element"])
@pytest.mark.parametrize(
    "options",
    [
        {"gate_activation": "softplus", "beta_activation": "sigmoid"},
        {"gate_activation": "qwen", "scale": 1.0},
        {"gate_activation": "sigmoid", "gate_lower_bound": -2.0},
        {"gate_activation": "kda"},
    ],
    ids=str,
)
def test_S3_gates_of_delta_nets_equal_the_runtimes(options: Mapping[str, Any], per_key: bool) -> None:
    assert_equals_runtime(*delta_net(per_key=per_key, **options))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_S3_unit_vectors_are_the_runtimes_for_short_vectors_too(scale: float) -> None:
    """What is added to the squared length decides below a length of a thousandth."""
    assert_equals_runtime(*delta_net(scale=scale, qk_l2_norm=1))


def test_S3_half_precision_delta_nets_keep_a_float32_state() -> None:
    options = {"gate_activation": "qwen", "beta_activation": "sigmoid", "qk_l2_norm": 1}
    assert_equals_runtime(*delta_net(dtype=np.float16, **options), tolerance=2**-10)


CASES = {
    "convolution": convolution("CausalConvWithState", activation="silu"),
    "varlen": convolution("VarlenCausalConvWithState", activation="silu"),
    "linear": linear("gated_delta", (2, 4)),
    "delta net": delta_net(gate_activation="qwen", beta_activation="sigmoid", qk_l2_norm=1),
}
counts = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=15)
@given(counts=counts, cut=st.integers(0, 6), data=st.data())
def test_E6_case_C3_packed_rows_are_those_alone_however_they_are_cut(
    kind: str, counts: list[int], cut: int, data: st.DataObject
) -> None:
    """Bits of outputs and states: any rows in any order, in one step or two, and each alone a token at a time."""
    case, make = CASES[kind]
    rows = [case.part(make(12), start, start + count) for start, count in enumerate(counts)]
    rows = [rows[i] for i in data.draw(st.permutations(range(len(rows))))]
    states = values(4, *case.shape)
    whole, after = case.packed(rows, states, 24)
    ends = np.cumsum([0, *map(case.count, rows)])

    # In two steps: a row that the first one runs to its end has no tokens in the second.
    firsts = [case.part(row, 0, min(cut, case.count(row))) for row in rows]
    rests = [case.part(row, min(cut, case.count(row)), case.count(row)) for row in rows]
    first, between = case.packed(firsts, states, 24)
    rest, twice = case.packed(rests, between, 24)
    np.testing.assert_array_equal(twice, after)
    halves = [np.split(out, np.cumsum([*map(case.count, part)])[:-1], case.axis)
              for out, part in ((first, firsts), (rest, rests))]  # fmt: skip
    joined = [part for pair in zip(*halves, strict=True) for part in pair]
    np.testing.assert_array_equal(np.concatenate(joined, case.axis), whole)

    for nth, row in enumerate(rows):
        own = states[[nth, *range(3)]]
        outputs = []
        for token in range(case.count(row)):
            output, own = case.packed([case.part(row, token, token + 1)], own, 4)
            outputs.append(output)
        np.testing.assert_array_equal(own[0], after[nth])
        expected = np.take(whole, np.arange(ends[nth], ends[nth + 1]), axis=case.axis)
        np.testing.assert_array_equal(np.concatenate(outputs, case.axis), expected)


@pytest.mark.parametrize("kind", ["varlen", "delta net"])
def test_S3_case_C3_rows_that_the_node_packs_itself_equal_the_runtimes(kind: str) -> None:
    case, make = CASES[kind]
    rows, states = [make(5), make(1), make(3)], values(3, *case.shape)
    expected, after = case.runtime(rows, states)
    found, found_after = case.packed(rows, np.concatenate([states, states[:1]]), 16)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(found_after[:3], after, rtol=0, atol=2e-6 * np.abs(after).max())


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (convolution("CausalConvWithState", activation="relu"), "has activation='relu', which isn't supported"),
        (delta_net(state_update_capacity=2), "has state_update_capacity=2, which isn't supported"),
        (delta_net(qk_l2_norm=2), "has qk_l2_norm=2, which isn't supported"),
        (linear("gated_delta", (3, 2)), "has 3 query heads for 2 key heads; one should divide the other"),
        (linear("other"), "has update_rule='other', which isn't supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_S2_what_is_not_honoured_is_named(case: tuple[Case, Make], problem: str) -> None:
    one, make = case
    (found,) = one.problems(make(2))
    assert found.endswith(problem)
    assert "(node '/node')" in found


def test_S2_a_rule_without_its_input_is_named() -> None:
    """The rules that decay need a decay, those that retrieve a beta."""
    case, make = linear("gated_delta")
    del case.node.input[4:]
    found = case.problems({name: array for name, array in make(2).items() if name in "qkv"})
    assert [problem.split("') has ")[1] for problem in found] == [
        f"update_rule='gated_delta' and no input {name!r}" for name in ("decay", "beta")
    ]


def test_S2_queries_packed_with_keys_and_values_are_named() -> None:
    """GatedDeltaNet takes one input for three, which isn't implemented."""
    case, make = delta_net("linear")
    case.node.input[1:3] = ["", ""]
    found = case.problems({"q": make(2)["q"]})
    assert [problem.split(") ")[1] for problem in found] == [
        "lacks its input 'key'",
        "lacks its input 'value'",
    ]
