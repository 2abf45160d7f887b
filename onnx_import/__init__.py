"""Reads ONNX Runtime GenAI model folders and runs their decoders as pure JAX functions.

    folder = onnx_import.read_folder("path")
    decoder = onnx_import.import_decoder(folder)
    logits, staged = decoder.apply(decoder.params, tokens, positions, attention, logits_rows, fixed)

Attention is the caller's, and so are fixed states: see `Attention` and `FixedState`.
"""

from onnx_import.decoder import Decoder, WeightMode, import_decoder
from onnx_import.errors import FolderError, ImportFailure, UnsupportedGraph, WeightError
from onnx_import.folder import FolderConfig
from onnx_import.manifest import SlidingWindow, StateGroup, StateTensor
from onnx_import.model_folder import ModelFolder, read_folder
from onnx_import.protocols import Attention, AttentionSpec, FixedSpec, FixedState, Step
from onnx_import.report import FolderReport, inspect_folder

__all__ = [
    "Attention",
    "AttentionSpec",
    "Decoder",
    "FixedSpec",
    "FixedState",
    "FolderConfig",
    "FolderError",
    "FolderReport",
    "ImportFailure",
    "ModelFolder",
    "SlidingWindow",
    "StateGroup",
    "StateTensor",
    "Step",
    "UnsupportedGraph",
    "WeightError",
    "WeightMode",
    "import_decoder",
    "inspect_folder",
    "read_folder",
]
