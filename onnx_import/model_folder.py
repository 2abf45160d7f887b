"""A model folder as read: configuration, names and graph, no weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_import.errors import FolderError
from onnx_import.folder import FolderConfig, read_config
from onnx_import.graph import Graph, parse_graph
from onnx_import.length_choice import by_sequence
from onnx_import.manifest import DecoderManifest
from onnx_import.masks import without_padding_masks
from onnx_import.pruned_head import with_all_rows
from onnx_import.states import find_states
from onnx_import.weights import leads_inside


@dataclass(frozen=True)
class ModelFolder:
    """What `read_folder` found at `path`."""

    path: Path
    config: FolderConfig
    manifest: DecoderManifest
    graph: Graph


def read_folder(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelFolder:
    """Read a folder written by the ONNX Runtime GenAI model builder, without loading weights.

    `overrides` is shaped like the folder's `genai_config.json` and merged into a copy of it as a JSON merge patch
    (RFC 7396): objects merge key by key, None removes a key, anything else replaces. The folder isn't changed, and
    the result is checked like a file that said the same.

    Raises FolderError, in one sentence naming the file and key, when anything is missing or malformed.
    """
    folder = Path(path)
    config, decoder = read_config(folder, overrides)
    file = folder / decoder.filename
    if not leads_inside(folder, file):
        raise FolderError(f"The configuration's model file {file} lies outside the model folder {folder}.")
    graph = with_all_rows(without_padding_masks(by_sequence(parse_graph(file))))
    return ModelFolder(folder, config, find_states(decoder, graph), graph)
