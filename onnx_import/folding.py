"""Values that are known while a program is traced: small constants, shapes, and what follows from those alone.

Shapes are static under `jit`, so Shape of an activation is a NumPy array, and a node whose inputs are all known runs at
once instead of becoming part of the program. That is how a Reshape finds its target in exports that compute it.
Activations are packed: a dimension that means the batch is 1, one that means the sequence length is the number of
tokens of all rows together.
"""

from collections.abc import Iterable, Mapping

from onnx_import.graph import Node, Tensor
from onnx_import.registry import Operator

_LARGEST = 1024
"""Elements of a constant that may be known; above it, a constant is a weight and stays a parameter."""


def is_known(tensor: Tensor) -> bool:
    """True for a constant that lies in the graph's file and is small."""
    return tensor.raw is not None and tensor.raw.size <= _LARGEST


def folded_values(
    nodes: Iterable[Node], operators: Mapping[str, Operator | None], tensors: Mapping[str, Tensor]
) -> frozenset[str]:
    """Outputs of the nodes that only need shapes and known values; `operators` is by a node's first output."""
    known = {name for name, tensor in tensors.items() if is_known(tensor)}
    folded: set[str] = set()
    for node in nodes:
        operator = operators[node.outputs[0]]
        # An operator with weights lays its constants out its own way, so it never sees their values.
        if operator is None or operator.looks_back or operator.weights is not None:
            continue
        if operator.of_shapes or all(name in known for name in node.inputs if name):
            folded.update(filter(None, node.outputs))
            known.update(folded)
    return frozenset(folded)
