"""One operator with a fixed state: through the importer on packed rows, and through ONNX Runtime."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime

from jaxengine.fixed_state import RowStates, StateRows
from onnx_import.graph import parse_graph
from onnx_import.ops import REGISTRY
from onnx_import.protocols import FixedSpec
from onnx_import.registry import Environment, resolve
from tests.onnx_import.one_node import Arrays

STATE, LENGTHS = "state", "lengths"
"""Names of a node's inputs: its state, and where the rows of a packed step begin and end."""

Row = Mapping[str, np.ndarray]
"""One sequence's tokens, an array an input."""


@dataclass(frozen=True)
class Case:
    """A node whose input `state` is dtype[rows, *shape] and, where it packs rows itself, `lengths` int32[rows + 1].

    `axis` is that of tokens in every other input and in the output; a batch of one is in front of it where it isn't 0.
    """

    node: onnx.NodeProto
    constants: Arrays
    shape: tuple[int, ...]
    axis: int
    opset: int = 21
    dtype: Any = np.float32
    _programs: list[Any] = field(default_factory=list)

    def model(self, feed: Row) -> onnx.ModelProto:
        """The graph of the node, `feed` as its inputs, with outputs Y, S."""
        first = next(iter(feed.values()))
        types = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
        value = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [self.node],
            "one",
            [value(name, kind, list(feed[name].shape)) for name, kind in types.items()],
            [
                value(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)
                for name, kind in zip(self.node.output, (first.dtype, self.dtype), strict=True)
            ],
            [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opsets = [onnx.helper.make_opsetid("", self.opset), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def runtime(self, rows: Sequence[Row], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ONNX Runtime's output and states; several rows, one behind the other, where the node packs them itself."""
        feed = {name: np.concatenate([row[name] for row in rows], self.axis) for name in rows[0]}
        if LENGTHS in self.node.input:
            feed[LENGTHS] = np.cumsum([0, *(self.count(row) for row in rows)]).astype(np.int32)
        feed[STATE] = states
        file = self.model(feed).SerializeToString()
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        output, after = session.run(None, feed)
        return output, after

    def packed(self, rows: Sequence[Row], states: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The importer's output and states, padded as the engine pads: to `tokens`, and to a row a state."""
        counts = [self.count(row) for row in rows]
        size, more = sum(counts), len(states) - len(rows)
        padding = [(0, tokens - size if axis == self.axis else 0) for axis in range(self.axis + 1)]
        packed = {}
        for name in rows[0]:
            joined = np.concatenate([row[name] for row in rows], self.axis)
            packed[name] = np.pad(joined, [*padding, *[(0, 0)] * (joined.ndim - len(padding))])
        batch = StateRows(
            start=np.array([*np.cumsum([0, *counts[:-1]]), *[0] * more], np.int32),
            num_tokens=np.array([*counts, *[0] * more], np.int32),
            source=np.arange(len(states), dtype=np.int32),
            owned=np.ones(len(states), bool),
            row_of=np.pad(np.repeat(np.arange(len(rows)), counts), (0, tokens - size)).astype(np.int32),
        )
        if not self._programs:
            self._programs.append(self._program(rows[0]))
        output, after = map(np.asarray, self._programs[0](packed, states, batch))
        return np.take(output, np.arange(size), axis=self.axis), after

    def count(self, row: Row) -> int:
        """How many tokens a row has."""
        return next(iter(row.values())).shape[self.axis]

    def part(self, row: Row, start: int, stop: int) -> Row:
        """Some of a row's tokens."""
        return {name: np.take(array, np.arange(start, stop), axis=self.axis) for name, array in row.items()}

    def problems(self, feed: Row) -> list[str]:
        """What the registry refuses about the node."""
        return self._resolved(feed)[2]

    def _resolved(self, feed: Row) -> tuple[Any, Any, list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            file.write_bytes(self.model(feed).SerializeToString())
            graph = parse_graph(file)
        (read,) = graph.nodes
        operator = REGISTRY.find(read.domain, read.op_type, graph.opsets[read.domain])
        assert operator is not None
        found: list[str] = []
        spec = FixedSpec(STATE, self.shape, np.dtype(self.dtype))
        call = resolve(operator, read, graph.tensors, -1, found, fixed=spec)
        names = dict(zip(read.inputs, (rule.name for rule in operator.inputs), strict=False))
        tensors = {names[name]: tensor for name, tensor in graph.tensors.items() if name in names}
        if not found and operator.check is not None:
            found += operator.check(call, tensors)
        return operator, call, found

    def _program(self, feed: Row) -> Any:
        operator, call, found = self._resolved(feed)
        assert found == []
        rules = [rule.name for rule in operator.inputs]
        names = dict(zip(call.node.inputs, rules, strict=False))

        def run(values: Row, states: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
            owner = RowStates({STATE: states}, rows, replayable=False)
            env = Environment(jnp.zeros(0, jnp.int32), _no_attention, owner)
            given = {**{name: jnp.asarray(array) for name, array in self.constants.items()}, **values}
            arguments = dict.fromkeys(rules) | {names[name]: value for name, value in given.items()}
            return operator.run(call, arguments, env)[0], env.staged_fixed[STATE]

        return jax.jit(run)


def _no_attention(*args: Any) -> Any:
    raise AssertionError("an operator with a fixed state called attention")
