"""Masks that hide padding are taken off attention nodes: packed rows have no padding, and the caller owns the lengths.

Such a mask is the graph input `attention_mask` of one flag a key, cast or not. Any other one stays where it is, and is
refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace

from onnx_import.graph import Graph, Node

_MASK_INPUT = "attention_mask"
_MASKED = {("com.microsoft", "MultiHeadAttention"): 4, ("com.microsoft", "Attention"): 3}
"""Attention operators with a padding mask, and at which input it lies."""


def without_padding_masks(graph: Graph) -> Graph:
    """The graph with every attention node's padding mask taken off."""
    if len(graph.inputs.get(_MASK_INPUT, (None, ()))[1]) != 2:
        return graph
    makers = {name: node for node in graph.nodes for name in node.outputs}
    return replace(graph, nodes=tuple(_without_mask(node, makers) for node in graph.nodes))


def _without_mask(node: Node, makers: Mapping[str, Node]) -> Node:
    index = _MASKED.get((node.domain, node.op_type))
    if index is None or index >= len(node.inputs) or not _is_padding(node.inputs[index], makers):
        return node
    return replace(node, inputs=(*node.inputs[:index], "", *node.inputs[index + 1 :]))


def _is_padding(name: str, makers: Mapping[str, Node]) -> bool:
    while name in makers and makers[name].op_type == "Cast":
        name = makers[name].inputs[0]
    return name == _MASK_INPUT
