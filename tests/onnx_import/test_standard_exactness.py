"""E6: standard operators that reduce inside a token's row give it the same bits whatever the number of rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onnx_import.graph import Node
from onnx_import.ops.matmul import multiply
from onnx_import.ops.normalization import OPERATORS as NORMALIZATIONS
from onnx_import.ops.reductions import OPERATORS as REDUCTIONS
from onnx_import.registry import Call, Environment, Operator

COUNTS = (2, 3, 8, 33, 256)
CASES = {
    "ReduceSum": {"axes": [-1]},
    "ReduceMean": {"axes": [-1]},
    "ReduceMax": {"axes": [-1]},
    "Softmax": {},
    "LogSoftmax": {},
    "CumSum": {},
    "LayerNormalization": {},
    "RMSNormalization": {},
    "LpNormalization": {},
}


def newest(op_type: str) -> Operator:
    found = [op for op in (*REDUCTIONS, *NORMALIZATIONS) if op.op_type == op_type]
    return max(found, key=lambda op: op.since)


def function_of(op_type: str, width: int) -> Callable[[jax.Array], jax.Array]:
    """The operator over the last axis, as a function of [1, rows, width]."""
    operator = newest(op_type)
    random = np.random.default_rng(width)
    attributes = {name: rule.default for name, rule in operator.attributes.items()}
    attributes.update(CASES[op_type] if "axes" in operator.attributes else {})
    statics = {"axes": (-1,), "axis": (2,)}
    call = Call(Node("", op_type, "", ("x",), ("y",), {}), attributes, statics, -1)
    weights = jnp.asarray(random.standard_normal(width, np.float32))

    def run(x: jax.Array) -> jax.Array:
        args = {rule.name: weights for rule in operator.inputs}
        args[operator.inputs[0].name] = x
        return operator.run(call, args, Environment(jnp.zeros(0), None))[0]  # type: ignore[arg-type]

    return jax.jit(run)


def assert_same_bits(run: Callable[[jax.Array], jax.Array], width: int) -> None:
    x = np.random.default_rng(width).standard_normal((1, max(COUNTS), width)).astype(np.float32)
    whole = np.asarray(run(x))
    for count in COUNTS:
        start = (max(COUNTS) - count) // 2
        part = np.asarray(run(x[:, start : start + count]))
        np.testing.assert_array_equal(part, whole[:, start : start + count], err_msg=f"{count} rows")


@pytest.mark.parametrize("width", [16, 100, 576])
@pytest.mark.parametrize("op_type", CASES)
def test_E6_reductions_keep_a_rows_bits(op_type: str, width: int) -> None:
    assert_same_bits(function_of(op_type, width), width)


@pytest.mark.parametrize("width", [16, 100, 576])
def test_E6_a_softmax_written_out_keeps_a_rows_bits(width: int) -> None:
    """An exponential after ReduceMax: fused with a plain maximum it changed its last bit with the rows."""
    largest, total = function_of("ReduceMax", width), function_of("ReduceSum", width)

    def run(x: jax.Array) -> jax.Array:
        weights = jnp.exp(x - largest(x))
        return weights / total(weights)

    assert_same_bits(jax.jit(run), width)


@pytest.mark.parametrize("width", [16, 100, 576])
def test_E6_a_product_with_a_computed_matrix_keeps_a_rows_bits(width: int) -> None:
    other = jnp.asarray(np.random.default_rng(0).standard_normal((width, 70), np.float32))
    assert_same_bits(jax.jit(lambda x: multiply(x, other)), width)
