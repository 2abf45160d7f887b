"""Runs ONNX's own node tests through the importer: registry, folding, plan and run, many cases in one program.

A node test feeds everything as graph inputs. Those that shape the program (static inputs, and what these are computed
from) become constants first. JAX runs without its 64-bit types, so 64-bit inputs are narrowed and results are
compared with the expected ones after narrowing these the same way.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from onnx_import.folding import folded_values
from onnx_import.graph import Graph, graph_of
from onnx_import.ops import WHOLE
from onnx_import.plan import constants, plan_call
from onnx_import.registry import TENSORS, Environment, Role, WeightPlan, resolve
from onnx_import.running import run_calls

CLAIMED = frozenset(op_type for domain, op_type in WHOLE._table if not domain)
"""Standard operators that the importer implements."""
_NARROW = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
_TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}
"""Relative and absolute; results are computed in float32 and rounded once, the expected ones at every operation."""


_QUICK = {"xla_backend_optimization_level": 0}
"""Compiling is what these tests spend their time on."""


REFUSED = "refused: "


class Refused(Exception):
    """The importer says what it doesn't support."""


@functools.cache
def claimed_cases() -> Mapping[str, Any]:
    """ONNX's node tests all of whose operators are claimed, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        cases = load_model_tests(kind="node")
    return {case.name: case for case in cases if _operators(case) <= CLAIMED | {"Constant"}}


def operator_of(case: Any) -> str:
    """The operator that a case is about, or for the expansion of a function the first word of the case's name."""
    name = case.name.removeprefix("test_")
    if "_expanded" in name:
        return f"{name.split('_')[0]}-expanded"
    return case.model.graph.node[0].op_type


def groups() -> dict[str, list[Any]]:
    """The claimed cases by what they are about."""
    found: dict[str, list[Any]] = {}
    for case in claimed_cases().values():
        found.setdefault(operator_of(case), []).append(case)
    return dict(sorted(found.items()))


def _operators(case: Any) -> set[str]:
    if any(node.domain for node in case.model.graph.node):
        return {"of another domain"}
    return {node.op_type for node in case.model.graph.node}


def check(cases: Sequence[Any], *, constant_operands: bool = False) -> dict[str, str]:
    """Run cases in one program and compare: what is wrong by a case's name, beginning with REFUSED where it is.

    With `constant_operands` all inputs but the first are constants.
    """
    wrong: dict[str, str] = {}
    feeds, expected, functions = {}, {}, {}
    for case in cases:
        for i, (inputs, outputs) in enumerate(case.data_sets):
            names = [value.name for value in case.model.graph.input]
            try:
                feed = {name: _array(value) for name, value in zip(names, inputs, strict=True)}
                expected[case.name, i] = [_array(value) for value in outputs]
                function, feeds[case.name, i] = _prepared(
                    case.model, feed, names[1:] if constant_operands else ()
                )
                jax.eval_shape(function, feeds[case.name, i])
            except Refused as refused:
                wrong[case.name] = f"{REFUSED}{refused}"
            except (TypeError, ValueError, NotImplementedError) as error:
                wrong[case.name] = f"{error} {getattr(error, '__notes__', '')}"
            else:
                functions[case.name, i] = function
    feeds = {key: feeds[key] for key in functions}
    program = jax.jit(
        lambda feeds: {key: functions[key](feed) for key, feed in feeds.items()}, compiler_options=_QUICK
    )
    for (name, i), results in program(feeds).items():
        case = claimed_cases()[name]
        for result, value in zip(results, expected[name, i], strict=True):
            try:
                _compare(np.asarray(result), value, case.rtol, case.atol)
            except AssertionError as error:
                wrong[name] = " ".join(str(error).split())
    return wrong


def run(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a graph, whose types need not be declared: any will do, since the values bring their own."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    for value in typed.graph.output:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    function, inputs = _prepared(typed, {name: _array(value) for name, value in feed.items()}, ())
    return [np.asarray(result) for result in jax.jit(function, compiler_options=_QUICK)(inputs)]


def _compare(result: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> None:
    assert result.dtype == expected.dtype, f"type {result.dtype}, expected {expected.dtype}"
    assert result.shape == expected.shape, f"shape {result.shape}, expected {expected.shape}"
    least = _TOLERANCE.get(expected.dtype.name, 0)
    if expected.dtype.kind in "fV":
        result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(result, expected, rtol=max(rtol, least), atol=max(atol, 1e-6, least))


def _prepared(
    model: onnx.ModelProto, feed: Mapping[str, np.ndarray], fixed: Sequence[str]
) -> tuple[Callable[[dict[str, Any]], list[Any]], dict[str, np.ndarray]]:
    """A graph as a function of its inputs, and these; `fixed` ones, weights and those that shape are constants."""
    shaping = _shaping(graph_of(model, Path("model.onnx"))) | set(fixed)
    constant = onnx.ModelProto()
    constant.CopyFrom(model)
    constant.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in feed.items() if name in shaping
    )
    graph = graph_of(constant, Path("model.onnx"))
    calls, params = _plan(graph)
    known = {name: tensor.view(tensor.raw) for name, tensor in graph.tensors.items()}

    def function(inputs: dict[str, Any]) -> list[Any]:
        values = {**inputs, **known}
        run_calls(calls, values, params, Environment(jnp.zeros(0, jnp.int32), None))  # type: ignore[arg-type]
        return [values[name] for name in graph.outputs]

    return function, {name: array for name, array in feed.items() if name not in shaping}


def _plan(graph: Graph) -> tuple[list[Any], dict[str, Any]]:
    operators = {}
    for node in graph.nodes:
        operators[node.outputs[0]] = WHOLE.find(node.domain, node.op_type, graph.opsets[node.domain])
    folded = folded_values(graph.nodes, operators, graph.tensors)
    problems: list[str] = []
    calls, weights = [], dict[str, WeightPlan]()
    for node in graph.nodes:
        operator = operators[node.outputs[0]]
        if operator is None:
            raise Refused(f"{node.label} at this opset")
        call = resolve(operator, node, graph.tensors, -1, problems, folded)
        if not problems and operator.check is not None:
            problems += operator.check(call, constants(operator, node, graph))
        if problems:
            raise Refused("; ".join(problems))
        calls.append(plan_call(call, operator, graph, folded, "exact", weights))
    built = {
        key: plan.build(*(source.view(source.raw) for source in plan.sources))
        for key, plan in weights.items()
    }
    return calls, jax.tree.map(jnp.asarray, built)


def _shaping(graph: Graph) -> set[str]:
    """Graph inputs that weights are, or that static inputs are computed from, other than through a shape."""
    wanted: set[str] = set()
    for node in reversed(graph.nodes):
        operator = WHOLE.find(node.domain, node.op_type, graph.opsets[node.domain])
        if operator is None:
            raise Refused(f"{node.label} at this opset")
        if wanted.intersection(node.outputs) and not operator.of_shapes:
            wanted.update(node.inputs)
        for rule, name in zip(operator.inputs_of(node), node.inputs, strict=False):
            if rule.role in (Role.STATIC, Role.WEIGHT):
                wanted.add(name)
    return wanted & set(graph.inputs)


def _array(value: Any) -> np.ndarray:
    """A test's value without 64-bit types; Refused for what no activation of a decoder is."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise Refused(f"a value that is a {type(value).__name__}")
    array = np.asarray(value)
    array = array.astype(_NARROW.get(array.dtype, array.dtype))
    if array.dtype.name not in TENSORS:
        raise Refused(f"values of type {array.dtype.name}")
    return array
