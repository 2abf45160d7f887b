"""Reads ONNX Runtime GenAI model folders and runs their decoders as pure JAX functions.

    folder = onnx_import.read_folder("path")
    decoder = onnx_import.import_decoder(folder)
    logits, staged = decoder.apply(decoder.params, tokens, positions, attention, logits_rows)

Attention is the caller's: see `Attention`.
"""

from onnx_import.decoder import Decoder, WeightMode, import_decoder
from onnx_import.errors import FolderError, ImportFailure, UnsupportedGraph, WeightError
from onnx_import.folder import FolderConfig, StateGroup
from onnx_import.model_folder import ModelFolder, read_folder
from onnx_import.protocols import Attention, AttentionSpec
from onnx_import.report import FolderReport, inspect_folder

__all__ = [
    "Attention",
    "AttentionSpec",
    "Decoder",
    "FolderConfig",
    "FolderError",
    "FolderReport",
    "ImportFailure",
    "ModelFolder",
    "StateGroup",
    "UnsupportedGraph",
    "WeightError",
    "WeightMode",
    "import_decoder",
    "inspect_folder",
    "read_folder",
]
