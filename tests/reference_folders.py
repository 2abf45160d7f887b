"""References of packed exports, which ONNX Runtime doesn't run on a CPU: two-dimensional ones, changed to match.

And the tolerance for them, from the number format and the depth. Every number that such a decoder reads or makes is
rounded to p significant bits, 11 in float16 and 8 in bfloat16, which changes it by a share of at most 2**-p. How far
that moves the logits depends on the model: a steep softmax or a choice of experts amplifies what a norm damps. So the
model is asked: ONNX Runtime runs it in float32 with errors of up to that size, at random, in all its weights and in
what each of its nodes makes. The largest difference that eight such runs make is the tolerance; nothing is added.
"""

import shutil
from pathlib import Path

import numpy as np
import onnx

from tests.model_checks import Checks

FLOAT32 = 1e-3
_SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}
_DRAWS = 8


def is_packed(form: str) -> bool:
    """Whether a form needs another one as its reference."""
    return form.startswith("paged")


def reference_folder(root: Path, form: str, family: str, temporary: Path) -> Path:
    """The folder that is run in place of root/form/family; made in a temporary one where its codes aren't the same.

    Packed exports quantise weights that were rounded to float16 first, which gives one code in a thousand another
    value. So their codes and scales take the place of those in the two-dimensional file.
    """
    if not is_packed(form):
        return root / form / family
    if "int4" not in form:
        return root / "cpu-fp32" / family
    return _with_codes(root / "cpu-int4" / family, root / form / family, temporary / "codes")


def tolerance(checks: Checks, root: Path, form: str, family: str, temporary: Path) -> float:
    """The share of the largest logit by which root/form/family, which `checks` runs, may differ from its reference."""
    bits = _SIGNIFICANT_BITS.get(checks.model.decoder.layers[0].kv_dtype.name)
    if bits is None:
        return FLOAT32
    folder = root / ("cpu-int4" if "int4" in form else "cpu-fp32") / family
    expected, largest = checks.reference_logits(folder), 0.0
    for seed in range(_DRAWS):
        moved = _with_errors(folder, temporary / f"errors-{seed}", 2.0**-bits, seed)
        largest = max(largest, np.abs(checks.reference_logits(moved) - expected).max())
    return float(largest / np.abs(expected).max())


def _with_errors(source: Path, target: Path, share: float, seed: int) -> Path:
    """A copy of a folder with every float32 number off by up to a share of it: constants, and what nodes make."""
    proto, random = onnx.load(source / "model.onnx"), np.random.default_rng(seed)
    floats = _floats(proto)
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            exact = onnx.numpy_helper.to_array(tensor)
            moved = exact * (1 + share * random.uniform(-1, 1, exact.shape))
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    nodes = []
    for node in proto.graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in floats:
                node.output[index] = f"{name}/exact"
                factor, values = f"{name}/factor", {"low": 1 - share, "high": 1 + share}
                values["seed"] = float(random.integers(1 << 20))
                nodes.append(
                    onnx.helper.make_node("RandomUniformLike", [f"{name}/exact"], [factor], dtype=1, **values)
                )
                nodes.append(onnx.helper.make_node("Mul", [f"{name}/exact", factor], [name]))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for opset in proto.opset_import:
        if not opset.domain:
            # The newest whose random numbers ONNX Runtime has on a CPU; the exports' operators are older.
            opset.version = min(opset.version, 21)
    return _written(source, target, proto)


def _floats(proto: onnx.ModelProto) -> set[str]:
    """The values that nodes make in float32, states apart, which a later step would read."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    kinds = {
        value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)
    }
    states = {value.name for value in proto.graph.output if value.name.startswith("present")}
    return {
        name
        for node in proto.graph.node
        for name in node.output
        # Nothing is inferred of operators of other domains, which make float32 only.
        if name and name not in states and (node.domain or kinds.get(name) == onnx.TensorProto.FLOAT)
    }


def _with_codes(source: Path, packed: Path, target: Path) -> Path:
    """A copy of a folder with the codes and scales of another export of the same model."""
    proto = onnx.load(source / "model.onnx")
    theirs = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(packed / "model.onnx").graph.initializer
    }
    for tensor in proto.graph.initializer:
        mine = onnx.numpy_helper.to_array(tensor)
        # Projections are one in some exports and three in others.
        names = [tensor.name]
        if tensor.name not in theirs and "qkv_proj" in tensor.name:
            names = [tensor.name.replace("qkv_proj", f"{kind}_proj") for kind in "qkv"]
        if set(names) <= theirs.keys() and mine.dtype in (np.uint8, np.float32):
            array = np.concatenate([theirs[name] for name in names]) if len(names) > 1 else theirs[names[0]]
            assert array.shape == mine.shape, tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(mine.dtype), tensor.name))
    return _written(source, target, proto)


def _written(source: Path, target: Path, proto: onnx.ModelProto) -> Path:
    target.mkdir()
    shutil.copy(source / "genai_config.json", target)
    onnx.save_model(proto, target / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return target
