"""A model folder as read: configuration, names and graph, no weights."""

from dataclasses import dataclass
from pathlib import Path

from onnx_import.errors import FolderError
from onnx_import.folder import DecoderManifest, FolderConfig, read_config
from onnx_import.graph import Graph, parse_graph
from onnx_import.weights import leads_inside


@dataclass(frozen=True)
class ModelFolder:
    """What `read_folder` found at `path`."""

    path: Path
    config: FolderConfig
    manifest: DecoderManifest
    graph: Graph


def read_folder(path: str | Path) -> ModelFolder:
    """Read a folder written by the ONNX Runtime GenAI model builder, without loading weights.

    Raises FolderError, in one sentence naming the file and key, when anything is missing or malformed.
    """
    folder = Path(path)
    config, manifest = read_config(folder)
    file = folder / manifest.filename
    if not leads_inside(folder, file):
        raise FolderError(f"The configuration's model file {file} lies outside the model folder {folder}.")
    return ModelFolder(folder, config, manifest, parse_graph(file))
