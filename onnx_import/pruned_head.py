"""A head that the graph prunes to some rows is taken back to all of them: which rows count is the caller's choice.

Exports may choose rows in front of the head: by the graph input `logits_indices` in the packed form, or as the last
token of each row in the 2-D form. In a packed step the last token is that of the last row only.
"""

from dataclasses import replace

import numpy as np

from onnx_import.graph import Graph, Node, Tensor

_INDICES = "logits_indices"


def with_all_rows(graph: Graph) -> Graph:
    """The graph without the nodes that choose rows."""
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            users.setdefault(name, []).append(node)
    instead: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if _is_gather(node, 0) and node.inputs[1] == _INDICES in graph.inputs:
            instead[node.outputs[0]] = instead.get(node.inputs[0], node.inputs[0])
        elif (widened := _widened_last_row(node, users, graph)) is not None:
            instead[widened] = instead.get(node.inputs[0], node.inputs[0])
        elif node.outputs[0] not in instead:
            kept.append(replace(node, inputs=tuple(instead.get(name, name) for name in node.inputs)))
    return replace(graph, nodes=tuple(kept))


def _is_gather(node: Node, axis: int) -> bool:
    is_gather = node.op_type == "Gather" and not node.domain and len(node.inputs) == 2
    return is_gather and node.attributes.get("axis", 0) == axis


def _widened_last_row(node: Node, users: dict[str, list[Node]], graph: Graph) -> str | None:
    """What a Gather of the last token becomes once an Unsqueeze has put its axis back; None for any other node."""
    if not _is_gather(node, 1) or node.inputs[0] in graph.tensors or not _holds(graph, node.inputs[1], -1):
        return None
    following = users.get(node.outputs[0], [])
    if len(following) != 1 or following[0].op_type != "Unsqueeze" or node.outputs[0] in graph.outputs:
        return None
    unsqueeze = following[0]
    given = len(unsqueeze.inputs) > 1 and _holds(graph, unsqueeze.inputs[1], 1)
    return unsqueeze.outputs[0] if given or unsqueeze.attributes.get("axes") == [1] else None


def _holds(graph: Graph, name: str, value: int) -> bool:
    tensor: Tensor | None = graph.tensors.get(name)
    return tensor is not None and tensor.raw is not None and np.array_equal(np.ravel(tensor.raw), [value])
