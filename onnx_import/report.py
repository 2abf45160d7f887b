"""What the importer sees in a folder, for people: operators, state, bytes, and what isn't supported."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_import.manifest import StateGroup
from onnx_import.model_folder import ModelFolder
from onnx_import.plan import survey


@dataclass(frozen=True)
class FolderReport:
    """The outcome of `inspect_folder`.

    `operators` counts live nodes by (domain, type), "" being the standard domain; `skipped_nodes` are those
    that nothing needs, such as the mask's. `weight_bytes` is the size of all live constants in the file.
    """

    model_type: str
    operators: Mapping[tuple[str, str], int]
    skipped_nodes: int
    state_groups: tuple[StateGroup, ...]
    weight_bytes: int
    weight_bytes_by_type: Mapping[str, int]
    unsupported: tuple[str, ...]
    notes: tuple[str, ...]


def inspect_folder(folder: ModelFolder) -> FolderReport:
    """Describe a folder; problems are listed, not raised, and no weight is read."""
    graph = folder.graph
    surveyed = survey(graph, folder.manifest)
    nodes = [node for node, _ in surveyed.nodes]
    names = {name for node in nodes for name in node.inputs if name in graph.tensors}
    tensors = {graph.tensors[name].source: graph.tensors[name] for name in names}
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype.name] += tensor.nbytes
    return FolderReport(
        model_type=folder.config.model_type,
        operators=dict(sorted(Counter((node.domain, node.op_type) for node in nodes).items())),
        skipped_nodes=len(graph.nodes) - len(nodes),
        state_groups=folder.manifest.state_groups,
        weight_bytes=sizes.total(),
        weight_bytes_by_type=dict(sorted(sizes.items())),
        unsupported=surveyed.problems,
        notes=folder.config.notes + folder.manifest.notes,
    )
