"""S2: every standard operator of the importer passes ONNX's own node tests, and says so where it refuses one.

A case that isn't run has a line in EXCLUDED with its reason: it must be refused by name, and fails here if it is not.
`python -m tests.onnx_import.test_standard_nodes` prints how many cases of each operator pass.
"""

import fnmatch
from typing import Any

import pytest

from tests.onnx_import.node_cases import CLAIMED, REFUSED, check, claimed_cases, groups

_NO_DOUBLE = "computes in float64, which JAX has not without its 64-bit mode"
_NO_FLOAT_RANGE = "a Range of floats; exports count in integers"
_NARROW_FLOAT = "floats of 8 or 4 bits, which no activation has"
_NARROW_INTEGER = "integers of 4 or 2 bits, which no activation has"

EXCLUDED = {
    "test_cast*FLOAT8*": _NARROW_FLOAT,
    "test_cast*FLOAT4*": _NARROW_FLOAT,
    "test_cast*INT4*": _NARROW_INTEGER,
    "test_cast*INT2*": _NARROW_INTEGER,
    "test_cast_FLOAT*_to_DOUBLE": _NO_DOUBLE,
    "test_castlike_FLOAT*_to_DOUBLE_expanded": _NO_DOUBLE,
    "test_attention_local_window_gqa_rank4_mask*": _NO_DOUBLE,
    "test_flexattention_double_expanded*": _NO_DOUBLE,
    "test_dequantizelinear_e*m*": _NARROW_FLOAT,
    "test_dequantizelinear_float4*": _NARROW_FLOAT,
    "test_dequantizelinear_*int[42]": "packed weights; see test_dequantize.py, an activation is never so narrow",
    "test_dequantizelinear_*int16": "codes of 16 bits, which no export's weights have",
    "test_reduce_log_sum_exp_*_expanded": _NO_DOUBLE,
    "test_[bh]*window*_expanded": _NO_FLOAT_RANGE,
    "test_range_*float*_type_positive_delta": _NO_FLOAT_RANGE,
    "test_equal_string*": "strings",
    "test_identity_sequence": "a sequence of tensors",
    "test_identity_opt": "an optional value",
    "test_edge_pad": "a pad by the edge's value, which no decoder needs",
    "test_reflect_pad": "a pad by reflection, which no decoder needs",
    "test_wrap_pad": "a pad by wrapping, which no decoder needs",
}


def excluded(name: str) -> str | None:
    """Why a case isn't run."""
    return next((reason for pattern, reason in EXCLUDED.items() if fnmatch.fnmatchcase(name, pattern)), None)


def verdicts(cases: list[Any], **how: bool) -> dict[str, str]:
    """What is wrong by case: a failure, or an exclusion that isn't a refusal."""
    outcome = check(cases, **how)
    found = {}
    for case in cases:
        message, reason = outcome.get(case.name, ""), excluded(case.name)
        if reason is None and message:
            found[case.name] = message
        elif reason is not None and not message.startswith(REFUSED):
            found[case.name] = f"is excluded ({reason}), but wasn't refused: {message or 'it passes'}"
    return found


# Written down rather than read from ONNX, which would take seconds whenever tests are collected.
_OWN = sorted(CLAIMED - {"SimplifiedLayerNormalization"} | {"Constant"})
_FUNCTIONS = (
    "attention blackmanwindow castlike center clip depthtospace elu flexattention gelu greater group hammingwindow "
    "hannwindow hardsigmoid layer leakyrelu less logsoftmax mish mvn nllloss prelu reduce relu rms rotary selu shrink "
    "softmax softplus softsign spacetodepth swiglu swish thresholdedrelu"
).split()


def _slow(names: list[str], *slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.mark.parametrize("operator", _slow(_OWN, "Attention"))
def test_S2_node_tests_of_an_operator_pass(operator: str) -> None:
    assert verdicts(groups()[operator]) == {}


@pytest.mark.parametrize("function", _slow(_FUNCTIONS, "attention"))
def test_S2_node_tests_of_a_function_written_out_pass(function: str) -> None:
    """The same functions as graphs of simpler operators, whose shapes are folded while tracing."""
    assert verdicts(groups()[f"{function}-expanded"]) == {}


@pytest.mark.parametrize(
    "operator",
    ["Clip", "Gemm", "LayerNormalization", "MatMul", "Min", "RMSNormalization", "RotaryEmbedding", "Where"],
)
def test_S2_node_tests_pass_with_constant_operands(operator: str) -> None:
    """Weights laid out when loading, and constants as parameters."""
    assert verdicts(groups()[operator], constant_operands=True) == {}


def test_S2_every_claimed_node_test_is_run() -> None:
    """Each operator but one of ONNX Runtime's has cases, and all cases belong to a test above."""
    assert set(groups()) == {*_OWN, *(f"{function}-expanded" for function in _FUNCTIONS)}


def test_S2_every_exclusion_excludes_a_case() -> None:
    unused = [pattern for pattern in EXCLUDED if not fnmatch.filter(claimed_cases(), pattern)]
    assert unused == []


if __name__ == "__main__":
    for operator, cases in groups().items():
        failed = verdicts(cases)
        reasons = sorted({reason for case in cases if (reason := excluded(case.name))})
        left_out = sum(excluded(case.name) is not None for case in cases)
        print(f"{operator:24} {len(cases) - left_out - len(failed):4} passed {left_out:4} excluded", *reasons)
        print(*(f"  FAILED {name}: {message}\n" for name, message in failed.items()), sep="", end="")
