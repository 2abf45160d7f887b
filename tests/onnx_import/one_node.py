"""One operator at a time: the same node through ONNX Runtime and through the registry."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime

from onnx_import.graph import Graph, parse_graph
from onnx_import.ops import REGISTRY
from onnx_import.registry import Call, Environment, Operator, Role, WeightPlan, resolve
from onnx_import.weights import WeightFiles

Arrays = Mapping[str, np.ndarray]
Kinds = Mapping[str, int]
FLOATS: Kinds = {}
"""All outputs are float32."""


def node(
    op_type: str, inputs: str, outputs: str = "Y", domain: str = "com.microsoft", **attributes: Any
) -> onnx.NodeProto:
    """A node with its inputs and outputs as words; `-` is an empty one."""
    names = [["" if name == "-" else name for name in words.split()] for words in (inputs, outputs)]
    return onnx.helper.make_node(op_type, *names, name="/node", domain=domain, **attributes)


def as_model(
    proto: onnx.NodeProto, feed: Arrays, constants: Arrays, kinds: Kinds = FLOATS
) -> onnx.ModelProto:
    """A graph of one node, `feed` as its inputs and `constants` in the file; `kinds` are its outputs' element types."""
    shapes = {
        name: (onnx.helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape))
        for name, array in feed.items()
    }
    graph = onnx.helper.make_graph(
        [proto],
        "one",
        [onnx.helper.make_tensor_value_info(name, *shapes[name]) for name in feed],
        [
            onnx.helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.FLOAT), None)
            for name in proto.output
            if name
        ],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def runtime(
    proto: onnx.NodeProto, feed: Arrays, constants: Arrays, kinds: Kinds = FLOATS
) -> list[np.ndarray]:
    """ONNX Runtime's outputs on the CPU."""
    file = as_model(proto, feed, constants, kinds).SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feed))


def _resolved(
    proto: onnx.NodeProto, feed: Arrays, constants: Arrays
) -> tuple[Graph, Operator, Call, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(as_model(proto, feed, constants).SerializeToString())
        graph = parse_graph(file)
    (read,) = graph.nodes
    operator = REGISTRY.find(read.domain, read.op_type, graph.opsets[read.domain])
    assert operator is not None, f"{read.label} isn't known"
    found: list[str] = []
    call = resolve(operator, read, graph.tensors, -1, found)
    if not found and operator.check is not None:
        found += operator.check(call, _constants(operator, call, graph))
    return graph, operator, call, found


def _constants(operator: Operator, call: Call, graph: Graph) -> dict[str, Any]:
    pairs = zip(operator.inputs, call.node.inputs, strict=False)
    return {rule.name: graph.tensors[name] for rule, name in pairs if name in graph.tensors}


def problems(proto: onnx.NodeProto, constants: Arrays, feed: Arrays | None = None) -> list[str]:
    """What the registry refuses about a node."""
    return _resolved(proto, feed or {}, constants)[3]


def imported(
    proto: onnx.NodeProto,
    feed: Arrays,
    constants: Arrays,
    mode: str = "exact",
    positions: Any = (),
    jit: bool = False,
) -> tuple[np.ndarray, ...]:
    """The importer's outputs, parameters laid out as on loading; `feed` are the activations."""
    return imported_function(proto, feed, constants, mode, positions, jit)(feed)


def imported_function(
    proto: onnx.NodeProto,
    feed: Arrays,
    constants: Arrays,
    mode: str = "exact",
    positions: Any = (),
    jit: bool = True,
) -> Any:
    """The node as a function of its activations; parameters are arguments of the compiled function."""
    graph, operator, call, found = _resolved(proto, feed, constants)
    assert found == []
    tensors = _constants(operator, call, graph)
    plans = dict(operator.weights(call, tensors, mode)) if operator.weights else {}
    roles = {rule.name: rule.role for rule in operator.inputs}
    plans.update(
        (name, WeightPlan.plain(tensor))
        for name, tensor in tensors.items()
        if roles[name] is Role.VALUE and name not in plans
    )
    files = WeightFiles(graph)
    params = {}
    for name, plan in plans.items():
        params[name] = jax.tree.map(jnp.asarray, plan.build(*(files.read(tensor) for tensor in plan.sources)))
        jax.tree.map(lambda array, struct: _same(array, struct), params[name], plan.struct)
    pairs = [
        (rule.name, name)
        for rule, name in zip(operator.inputs, call.node.inputs, strict=False)
        if name in feed
    ]

    def run(params: Any, values: Any) -> Any:
        arguments = {rule.name: None for rule in operator.inputs} | params
        arguments |= {rule: values[name] for rule, name in pairs}
        return operator.run(call, arguments, Environment(jnp.asarray(positions, jnp.int32), _no_attention))

    compiled = jax.jit(run) if jit else run
    return lambda values: tuple(
        np.asarray(result) if result is not None else None
        for result in compiled(params, {name: jnp.asarray(array) for name, array in values.items()})
    )


def _same(array: Any, struct: Any) -> None:
    assert (array.shape, array.dtype) == (struct.shape, struct.dtype), "planned otherwise than built"


def _no_attention(*args: Any) -> Any:
    raise AssertionError("a token-wise operator called attention")


def assert_exact(
    proto: onnx.NodeProto, feed: Arrays, constants: Arrays, counts: Any = (2, 33), mode: str = "exact"
) -> None:
    """A token's bits don't depend on the number of other tokens: `feed` has one row a token."""
    run = imported_function(proto, feed, constants, mode)
    whole = run(feed)[0]
    for count in counts:
        part = run({name: array[-count:] for name, array in feed.items()})[0]
        np.testing.assert_array_equal(part, whole[-count:], err_msg=f"{count} tokens")
