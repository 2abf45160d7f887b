"""The ONNX graph as plain frozen values, parsed without touching external data.

Constants and the Reshape or Transpose of a constant are folded into tensor references here, so a weight that
two ops share in different layouts is still one tensor of the file (tied embeddings).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from onnx_import.errors import FolderError, WeightError

PACKED_TYPES = frozenset(("int4", "uint4"))
"""Element types that lie two in a byte, the first one in its low half."""


@dataclass(frozen=True)
class Tensor:
    """A constant of the graph: where its bytes are and how they are seen. Holds no weight data.

    `stored` is the shape in the file, `shape` the one seen: reshaped first, then swapped if `transposed`.
    Exactly one of `location` (external, with offset and length in bytes) and `raw` (small, in the file) is set.
    """

    source: str
    dtype: np.dtype
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    location: str | None
    offset: int
    length: int
    raw: np.ndarray | None

    @property
    def key(self) -> str:
        """Equal for two views exactly when they show the same bytes in the same layout."""
        untransposed = self.shape[::-1] if self.transposed else self.shape
        view = "" if untransposed == self.stored else f":{'x'.join(map(str, untransposed))}"
        return self.source + view + (":T" if self.transposed else "")

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return stored_bytes(self.stored, self.dtype)

    def transpose(self) -> "Tensor":
        """The rank-two tensor with its axes swapped."""
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    def view(self, array: np.ndarray) -> np.ndarray:
        """Apply reshape and transpose to the array as stored."""
        if self.transposed:
            return array.reshape(self.shape[::-1]).T
        return array.reshape(self.shape)


@dataclass(frozen=True)
class Node:
    """One operator call; empty names are absent optional inputs or outputs."""

    domain: str
    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """How messages name this node."""
        return f"{self.domain or 'ai.onnx'}::{self.op_type} (node {self.name or self.outputs[0]!r})"


@dataclass(frozen=True)
class Graph:
    """A decoder's graph in topological order; `inputs` and `outputs` are name to (dtype, shape with None for free)."""

    file: Path
    opsets: Mapping[str, int]
    inputs: Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]
    outputs: Mapping[str, tuple[np.dtype, tuple[int | None, ...]]]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]


def stored_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Bytes that a tensor takes in a file; ONNX packs two 4-bit elements into a byte."""
    count = math.prod(shape)
    return -(-count // 2) if dtype.name in PACKED_TYPES else count * dtype.itemsize


def parse_graph(file: Path) -> Graph:
    """Parse an ONNX file, leaving external data where it is.

    Raises FolderError when the file is missing or isn't ONNX.
    """
    try:
        model = onnx.load(str(file), format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise FolderError(f"The model file {file} doesn't exist.") from None
    except (DecodeError, OSError) as error:
        raise FolderError(f"{file} isn't a readable ONNX file: {error}.") from None
    if not model.graph.node:
        raise FolderError(f"{file} isn't a readable ONNX file: its graph is empty.")
    return graph_of(model, file)


def graph_of(model: onnx.ModelProto, file: Path) -> Graph:
    """The graph of a model that was read from `file`, beside which its external data lies."""
    for proto in model.graph.node:
        if not (proto.output and proto.output[0]):
            raise FolderError(
                f"{file} has the node {proto.name!r} of type {proto.op_type!r} without a first output; export the "
                "model again."
            )
    initializers = {proto.name: _tensor(proto.name, proto) for proto in model.graph.initializer}
    nodes, tensors = _fold([_node(proto) for proto in model.graph.node], initializers)
    return Graph(
        file=file,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        inputs={
            value.name: _value_type(file, value)
            for value in model.graph.input
            if value.name not in initializers
        },
        outputs={value.name: _value_type(file, value) for value in model.graph.output},
        nodes=nodes,
        tensors=tensors,
    )


def live_nodes(
    nodes: Iterable[Node], roots: Iterable[str], reads: Mapping[str, tuple[str, ...]]
) -> tuple[Node, ...]:
    """The nodes that `roots` depend on, in order; `reads` gives the inputs that a node (by first output) reads."""
    wanted, kept = set(roots), []
    for node in reversed(tuple(nodes)):
        if wanted.intersection(node.outputs) - {""}:
            kept.append(node)
            wanted.update(reads[node.outputs[0]])
    return tuple(reversed(kept))


def _node(proto: onnx.NodeProto) -> Node:
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in proto.attribute}
    attributes = {
        key: value.decode(errors="replace") if isinstance(value, bytes) else value
        for key, value in attributes.items()
    }
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(domain, proto.op_type, proto.name, tuple(proto.input), tuple(proto.output), attributes)


def _value_type(file: Path, value: onnx.ValueInfoProto) -> tuple[np.dtype, tuple[int | None, ...]]:
    kind = value.type.tensor_type
    if kind.elem_type not in onnx.helper.get_all_tensor_dtypes():
        raise FolderError(f"{file} gives its value {value.name!r} no tensor type; export the model again.")
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape


def _tensor(name: str, proto: onnx.TensorProto) -> Tensor:
    if proto.data_type not in onnx.helper.get_all_tensor_dtypes():
        raise WeightError(
            f"Tensor {name!r} has the element type {proto.data_type}, which ONNX doesn't define."
        )
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(proto.data_type))
    shape = tuple(proto.dims)
    if proto.data_location != onnx.TensorProto.EXTERNAL:
        try:
            raw = onnx.numpy_helper.to_array(proto)
        except ValueError as error:
            raise WeightError(
                f"Tensor {name!r} of shape {list(shape)} doesn't fit its data: {error}."
            ) from None
        return Tensor(name, dtype, shape, shape, False, None, 0, raw.nbytes, raw)
    entries = {entry.key: entry.value for entry in proto.external_data}
    nbytes = stored_bytes(shape, dtype)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
    except ValueError:
        raise WeightError(f"Tensor {name!r} has an offset or length that isn't an integer.") from None
    return Tensor(name, dtype, shape, shape, False, entries.get("location", ""), offset, length, None)


def _fold(nodes: list[Node], initializers: dict[str, Tensor]) -> tuple[tuple[Node, ...], dict[str, Tensor]]:
    """Turn Constant nodes, and Reshape or Transpose of constants, into tensors."""
    tensors, kept = dict(initializers), []
    for node in nodes:
        folded = _constant(node) or _reshaped(node, tensors) or _transposed(node, tensors)
        if folded is None:
            kept.append(node)
        else:
            tensors[node.outputs[0]] = folded
    return tuple(kept), tensors


_CONSTANT_TYPES = {
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_float": np.float32,
    "value_floats": np.float32,
}


def _constant(node: Node) -> Tensor | None:
    if node.op_type != "Constant" or node.domain:
        return None
    value = node.attributes.get("value")
    if isinstance(value, onnx.TensorProto):
        return _tensor(node.outputs[0], value)
    for name, dtype in _CONSTANT_TYPES.items():
        if name in node.attributes:
            array = np.asarray(node.attributes[name], dtype)
            return Tensor(
                node.outputs[0], array.dtype, array.shape, array.shape, False, None, 0, array.nbytes, array
            )
    return None


def constant_outputs(graph: onnx.GraphProto) -> tuple[Tensor, ...]:
    """The outputs of a sub-graph, such as a branch of `If`, where all are constants; else nothing."""
    found = {proto.name: _tensor(proto.name, proto) for proto in graph.initializer}
    found.update((proto.output[0], constant) for proto in graph.node if (constant := _constant(_node(proto))))
    outputs = [value.name for value in graph.output]
    return tuple(found[name] for name in outputs) if found.keys() >= set(outputs) else ()


def _reshaped(node: Node, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if node.op_type != "Reshape" or node.domain or len(node.inputs) != 2:
        return None
    if not all(name in tensors for name in node.inputs):
        return None
    data, shape = (tensors[name] for name in node.inputs)
    if data.transposed or shape.raw is None or node.attributes.get("allowzero") or (shape.raw <= 0).any():
        return None
    target = tuple(int(size) for size in shape.raw)
    return replace(data, shape=target) if np.prod(target) == np.prod(data.shape) else None


def _transposed(node: Node, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if node.op_type != "Transpose" or node.domain or not tensors.keys() & node.inputs[:1]:
        return None
    data = tensors[node.inputs[0]]
    if len(data.shape) != 2 or list(node.attributes.get("perm", (1, 0))) != [1, 0]:
        return None
    return data.transpose()
