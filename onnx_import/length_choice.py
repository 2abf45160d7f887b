"""A graph's choice between two sets of rotary tables by the length of its batch, turned into a choice by sequence.

Exports of models with long and short rotary factors hold `If(Greater(length, threshold))` over constants, where length
is the width of `attention_mask`, or the columns of `block_table` times a block size: one choice for the whole batch.
Here the `If` becomes a node of its own, which chooses for each token by the limit of its own sequence.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx

from onnx_import.graph import Graph, Node, Tensor, constant_outputs

DOMAIN, OP_TYPE = "onnx_import", "LengthChoice"


def by_sequence(graph: Graph) -> Graph:
    """The graph with every `If` that chooses tables by length replaced; any other is left, to be refused by name.

    The new node has the attribute `threshold` and as inputs, for each output, the table of sequences that may come to
    hold more tokens than that, then the table of the others.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    nodes, tensors = [], dict(graph.tensors)
    for node in graph.nodes:
        threshold = _threshold(node, makers, graph.tensors)
        branches = [_constants(node, name) for name in ("then_branch", "else_branch")]
        if threshold is None or not all(branches):
            nodes.append(node)
            continue
        tables = [table for pair in zip(*branches, strict=True) for table in pair]
        tensors.update((table.source, table) for table in tables)
        inputs = tuple(table.source for table in tables)
        attributes = {"threshold": threshold}
        nodes.append(replace(node, domain=DOMAIN, op_type=OP_TYPE, inputs=inputs, attributes=attributes))
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _threshold(node: Node, makers: Mapping[str, Node], tensors: Mapping[str, Tensor]) -> int | None:
    """The constant of an `If` on `length > constant`, or None."""
    if node.op_type != "If" or node.domain:
        return None
    compare = makers.get(node.inputs[0])
    if compare is None or compare.op_type != "Greater" or not _is_length(compare.inputs[0], makers, tensors):
        return None
    return _integer(compare.inputs[1], tensors)


def _is_length(name: str, makers: Mapping[str, Node], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a value is Shape(attention_mask)[1], or Shape(block_table)[1] times a constant."""
    node, source = makers.get(name), "attention_mask"
    if node is not None and node.op_type == "Mul" and _integer(node.inputs[1], tensors) is not None:
        node, source = makers.get(node.inputs[0]), "block_table"
    if node is None or node.op_type != "Gather" or _integer(node.inputs[1], tensors) != 1:
        return False
    shape = makers.get(node.inputs[0])
    return shape is not None and shape.op_type == "Shape" and shape.inputs[0] == source


def _integer(name: str, tensors: Mapping[str, Tensor]) -> int | None:
    tensor = tensors.get(name)
    if tensor is None or tensor.raw is None or tensor.raw.size != 1 or tensor.raw.dtype.kind != "i":
        return None
    return int(np.ravel(tensor.raw)[0])


def _constants(node: Node, branch: str) -> tuple[Tensor, ...]:
    """The outputs of a branch that holds constants only, named after the node's; nothing where it doesn't."""
    graph = node.attributes.get(branch)
    constants = constant_outputs(graph) if isinstance(graph, onnx.GraphProto) else ()
    names = [f"{output}:{branch}" for output in node.outputs]
    return tuple(replace(tensor, source=name) for tensor, name in zip(constants, names, strict=False))
