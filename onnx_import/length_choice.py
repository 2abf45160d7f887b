"""A graph's choice between two sets of rotary tables by the length of its batch, turned into a choice by sequence.

Exports of models with long and short rotary factors choose once for the whole batch, in one of two forms. Either
`If(Greater(length, threshold))` over constants, where length is the width of `attention_mask`, or the columns of
`block_table` times a block size. Or one table, the short one with the long one behind it, and positions moved there by
`Add(Mul(Cast(GreaterOrEqual(ReduceMax(position_ids), threshold)), threshold), position_ids)`. Here each becomes a node
of its own, which chooses for each token by the limit of its own sequence.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx

from onnx_import.graph import Graph, Node, Tensor, constant_outputs

DOMAIN = "onnx_import"
TABLES, POSITIONS = "TablesByLength", "PositionsByLength"


def by_sequence(graph: Graph) -> Graph:
    """The graph with every choice by length replaced; any other `If` is left, to be refused by name.

    Both new nodes have the attribute `threshold`. TABLES has as inputs, for each output, the table of sequences that
    may come to hold more tokens than that, then the table of the others; POSITIONS has position_ids.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    nodes, tensors = [], dict(graph.tensors)
    for node in graph.nodes:
        tables = _tables(node, makers, graph.tensors)
        tensors.update((table.source, table) for table in tables)
        offset = _offset(node, makers, graph.tensors)
        if tables:
            threshold = _integer(makers[node.inputs[0]].inputs[1], graph.tensors)
            nodes.append(_own(node, TABLES, tuple(table.source for table in tables), threshold))
        elif offset is not None:
            nodes.append(_own(node, POSITIONS, ("position_ids",), offset))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), tensors=tensors)


def _own(node: Node, op_type: str, inputs: tuple[str, ...], threshold: int | None) -> Node:
    return replace(node, domain=DOMAIN, op_type=op_type, inputs=inputs, attributes={"threshold": threshold})


def _tables(node: Node, makers: Mapping[str, Node], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Long and short table of each output of an `If` on `length > constant`; nothing for any other node."""
    if node.op_type != "If" or node.domain:
        return []
    compare = makers.get(node.inputs[0])
    if compare is None or compare.op_type != "Greater" or _integer(compare.inputs[1], tensors) is None:
        return []
    branches = [_constants(node, name) for name in ("then_branch", "else_branch")]
    if not _is_length(compare.inputs[0], makers, tensors) or not all(branches):
        return []
    return [table for pair in zip(*branches, strict=True) for table in pair]


def _offset(node: Node, makers: Mapping[str, Node], tensors: Mapping[str, Tensor]) -> int | None:
    """The threshold of a node that moves positions behind the short table, or None."""
    if node.op_type != "Add" or node.domain or _uncast(node.inputs[1], makers) != "position_ids":
        return None
    product = makers.get(node.inputs[0])
    compare = makers.get(_uncast(product.inputs[0], makers)) if product and product.op_type == "Mul" else None
    longest = makers.get(compare.inputs[0]) if compare and compare.op_type == "GreaterOrEqual" else None
    if product is None or compare is None or longest is None or longest.op_type != "ReduceMax":
        return None
    if _uncast(longest.inputs[0], makers) != "position_ids":
        return None
    moved, threshold = (_integer(item.inputs[1], tensors) for item in (product, compare))
    return threshold if moved == threshold else None


def _uncast(name: str, makers: Mapping[str, Node]) -> str:
    while name in makers and makers[name].op_type == "Cast":
        name = makers[name].inputs[0]
    return name


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
