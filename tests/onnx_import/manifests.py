"""Decoder sections and graphs of any layers and kinds of state, made without a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_import
from onnx_import.graph import Graph, Node
from onnx_import.manifest import DecoderManifest, read_decoder
from onnx_import.sections import Section
from onnx_import.states import find_states

LAYERS = 6
INPUTS = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "past_conv_names": "past.%d.conv",
    "past_recurrent_names": "past.%d.recurrent",
}
OUTPUTS = {
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
    "present_conv_names": "present.%d.conv",
    "present_recurrent_names": "present.%d.recurrent",
}
SHAPES = {
    "key": (None, None, 2, 16),
    "value": (None, None, 2, 16),
    "conv": (None, 64, 2),
    "recurrent": (None, 4, 8, 8),
}
PARTS = {"paged_kv": ("key", "value"), "fixed_conv": ("conv",), "fixed_recurrent": ("recurrent",)}
HYBRID = {"paged_kv": [1, 4], "fixed_conv": [0, 2, 4], "fixed_recurrent": [2]}

Owners = dict[str, list[int]]


def section(groups: Any = None, **more: Any) -> dict[str, Any]:
    """A decoder section; `groups` as kind to layers, or anything else as it is; None leaves the key out."""
    if isinstance(groups, dict):
        groups = [{"kind": kind, "layer_ids": layers} for kind, layers in groups.items()]
    found = {} if groups is None else {"state_groups": groups}
    names = {"inputs": dict(INPUTS), "outputs": dict(OUTPUTS)}
    return {"filename": "model.onnx", "num_hidden_layers": LAYERS, **names, **found, **more}


def graph(owners: Owners, window: dict[int, int] | None = None) -> Graph:
    """The inputs and outputs of a graph whose layers own these states, and attention nodes with windows."""
    inputs: dict[str, Any] = {"input_ids": (np.dtype(np.int64), (None,))}
    outputs: dict[str, Any] = {"logits": (np.dtype(np.float16), (None, 320))}
    nodes = []
    for kind, layers in owners.items():
        for layer in layers:
            for part in PARTS[kind]:
                dtype = np.dtype(np.float32 if part == "recurrent" else np.float16)
                prefix = "past_key_values" if kind == "paged_kv" else "past"
                inputs[f"{prefix}.{layer}.{part}"] = dtype, SHAPES[part]
                outputs[f"present.{layer}.{part}"] = dtype, SHAPES[part]
    for layer, size in (window or {}).items():
        reads = ("query", "", "", f"past_key_values.{layer}.key")
        attributes = {"local_window_size": size}
        nodes.append(Node("com.microsoft", "PagedAttention", f"/layers.{layer}", reads, ("y",), attributes))
    return Graph(Path("model.onnx"), {}, inputs, outputs, tuple(nodes), {})


def manifest(values: dict[str, Any], of: Graph) -> DecoderManifest:
    return find_states(read_decoder(Section(Path("genai_config.json"), values, "model.decoder")), of)


def refused(values: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(onnx_import.FolderError) as caught:
        manifest(values, graph(HYBRID))
    assert str(caught.value).startswith("genai_config.json: key 'model.decoder.")
    assert key in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
