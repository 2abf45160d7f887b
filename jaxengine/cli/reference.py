"""ONNX Runtime as a reference: the logits of a folder's own file, its inputs filled by what the graph says of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnx_import
from jaxengine.cli.errors import CommandError
from jaxengine.model import Model


def require_runtime() -> Any:
    """The package onnxruntime, or a `CommandError` that says how to get it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise CommandError(
            "verify needs the package onnxruntime; install it with pip install 'jaxengine[verify]'"
        ) from error
    return onnxruntime


def reference_logits(
    folder: onnx_import.ModelFolder, model: Model, ids: np.ndarray, runtime: Any
) -> np.ndarray:
    """ONNX Runtime's float32[positions, vocab] on the folder's file, `runtime` being the package.

    A graph that gives the last position's logits only is run once a position. `model` has the sizes of heads that
    the graph leaves open.

    Raises:
        CommandError: The graph takes something that isn't known, or ONNX Runtime can't load or run it.
    """
    file = folder.graph.file
    proto = _runnable(folder)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    # It makes a MatMulNBits of a DequantizeLinear in front of a MatMul, and that one too rounds activations by itself.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # Where the session looks for external data, since it gets the graph as bytes.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    try:
        session = runtime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        def logits(prompt: np.ndarray) -> np.ndarray:
            feed = dict(session_inputs(folder, model, prompt))
            return np.asarray(session.run([folder.manifest.logits], feed)[0], np.float32)[0]

        found = logits(ids)
        if len(found) != len(ids):
            found = np.stack([logits(ids[: end + 1])[-1] for end in range(len(ids))])
    except CommandError:
        raise
    except Exception as error:  # the package raises nothing narrower
        reason = " ".join(str(error).split())
        raise CommandError(f"ONNX Runtime can't run {file}: {reason}") from error
    return found


def _runnable(folder: onnx_import.ModelFolder) -> onnx.ModelProto:
    """The folder's graph, changed where ONNX Runtime would round more than the graph says, or refuses what it says."""
    proto = onnx.load(str(folder.graph.file), load_external_data=False)
    _put_experts_in_float(proto, folder.graph.file.parent)
    positions, row = folder.manifest.position_ids, "jaxengine/one_row_of_positions"
    three_rows = len(folder.graph.inputs.get(positions, (None, ()))[1]) == 3
    used = False
    for node in proto.graph.node:
        if node.op_type == "MatMulNBits":
            others = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend([*others, onnx.helper.make_attribute("accuracy_level", 1)])
        elif node.op_type == "RotaryEmbedding" and three_rows and node.input[1] == positions:
            # M-RoPE's three rows are one for text, and the kernel takes one.
            node.input[1], used = row, True
    if used:
        zero = onnx.helper.make_tensor(f"{row}/index", onnx.TensorProto.INT64, [], [0])
        proto.graph.initializer.append(zero)
        proto.graph.node.insert(0, onnx.helper.make_node("Gather", [positions, zero.name], [row], axis=0))
    return proto


def _put_experts_in_float(proto: onnx.ModelProto, folder: Path) -> None:
    """Turns each QMoE of 8-bit blocks into the MoE of the same weights, since ONNX Runtime rounds its activations.

    The float32 weights come to lie in the graph. One with zero points or three matrices stays as it is. `folder` holds
    the external data.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        values = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        if node.op_type != "QMoE" or values.get("expert_weight_bits") != 8 or any(node.input[8:]):
            continue
        for codes, scales in ((node.input[2], node.input[3]), (node.input[5], node.input[6])):
            held, steps = (onnx.numpy_helper.to_array(tensors[name], str(folder)) for name in (codes, scales))
            if steps.ndim == 2:
                steps = steps[..., None]
            # Eight bits without zero points are centred at 128.
            exact = (held.astype(np.float32) - 128) * np.repeat(
                steps, held.shape[2] // steps.shape[2], axis=2
            )
            tensors[codes].CopyFrom(onnx.numpy_helper.from_array(exact.astype(np.float32), codes))
        dropped = ("expert_weight_bits", "block_size", "use_sparse_mixer")
        kept = [item for item in node.attribute if item.name not in dropped]
        inputs = [name for place, name in enumerate(node.input[:8]) if place not in (3, 6)]
        del node.input[:], node.attribute[:]
        node.input.extend(inputs)
        node.attribute.extend(kept)
        node.op_type = "MoE"


def _slots(folder: onnx_import.ModelFolder, cache: str) -> int:
    """How many slots an empty cache has: a windowed one that keeps no more than its window has them from the start."""
    for node in folder.graph.nodes:
        if cache in node.inputs and node.attributes.get("sliding_window_cache"):
            return int(node.attributes["local_window_size"])
    return 0


def session_inputs(
    folder: onnx_import.ModelFolder, model: Model, ids: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Every input of a two-dimensional graph by name, for one sequence of `ids` int[tokens] from empty state.

    Raises CommandError, naming the input, for one that is neither tokens, mask, positions nor state.
    """
    manifest = folder.manifest
    states = {tensor.input: tensor for group in manifest.state_groups for tensor in group.tensors}
    plain: Mapping[str, np.ndarray] = {
        manifest.input_ids: ids,
        manifest.attention_mask: np.ones_like(ids),
        manifest.position_ids: np.arange(len(ids)),
    }
    heads = {spec.layer: (spec.num_kv_heads, spec.head_dim) for spec in model.decoder.layers}
    for name, (dtype, shape) in folder.graph.inputs.items():
        if name in plain:
            # Positions of three axes (MRoPE) are the same on each.
            sizes = [*(size or 1 for size in shape[:-1]), len(ids)]
            yield name, np.broadcast_to(plain[name].astype(dtype), sizes)
        elif name in states and states[name].kind == "paged_kv":
            num_heads, head_dim = heads[states[name].layer]
            yield (
                name,
                np.zeros((1, shape[1] or num_heads, _slots(folder, name), shape[3] or head_dim), dtype),
            )
        elif name in states:
            yield name, np.zeros([1, *(size or 1 for size in shape[1:])], dtype)
        elif len(shape) == 5 and shape[0] == 2 and shape[2] and shape[4]:
            # Keys and values in one tensor, as com.microsoft Attention keeps them.
            yield name, np.zeros((2, 1, shape[2], 0, shape[4]), dtype)
        else:
            raise CommandError(
                f"the graph of {folder.path} takes the input {name!r}, which verify can't fill; "
                "compare with another export"
            )
