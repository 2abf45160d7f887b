"""References of packed exports, which ONNX Runtime doesn't run on a CPU: two-dimensional exports changed to match.

And the tolerance for them, from the number format and the depth. Every number that such a decoder reads or makes is
rounded to p significant bits, 11 in float16 and 8 in bfloat16, which changes it by a share of at most 2**-p. How far
that moves the logits depends on the model: a steep softmax or a choice of experts amplifies what a norm damps. So the
model is asked: ONNX Runtime runs it with errors of that size, at random, in its W weights and nothing else, and the
largest difference that eight such draws make is D. Rounding the output of a product moves the logits as errors in its
weight do: errors of independent sign in all terms come to the same share of a sum as one in the sum. So A roundings of
what calls compute add to those of W weights as squares do, to D sqrt((W + A) / W). Nothing is added to that for safety.
"""

import math
import shutil
from pathlib import Path

import numpy as np
import onnx

import jaxengine as je
from tests.model_checks import Checks, Reference

FLOAT32 = 1e-3
_SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}
_DRAWS = 8
_MOVES = frozenset(
    "Cast Concat Constant Expand Gather Identity Reshape Shape Slice Split Squeeze Transpose Unsqueeze".split()
)
"""Operators that compute nothing."""
_FUSED = {
    "MoE": 6,  # two products, two sums with a bias, an activation, the mix
    "QMoE": 6,
    "PagedAttention": 3,  # queries and keys turned, the output
    "SkipLayerNormalization": 2,
    "SkipSimplifiedLayerNormalization": 2,
}
"""How often one call rounds, where that is more than once."""


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
    expected, largest = checks.reference_logits(Reference(folder)), 0.0
    for seed in range(_DRAWS):
        moved = _with_errors(folder, temporary / f"errors-{seed}", 2.0**-bits, seed)
        largest = max(largest, np.abs(checks.reference_logits(Reference(moved)) - expected).max())
    weights, calls = _depth(checks.model)
    return float(largest / np.abs(expected).max() * math.sqrt((weights + calls) / weights))


def _depth(model: je.Model) -> tuple[int, int]:
    """How many weights a decoder has and how often its calls round."""
    plan = model.decoder.plan  # type: ignore[attr-defined]
    calls = [planned.call.node.op_type for planned in (*plan.head, *plan.tail)]
    return len(plan.weights), sum(_FUSED.get(call, 1) for call in calls if call not in _MOVES)


def _with_errors(source: Path, target: Path, share: float, seed: int) -> Path:
    """A copy of a folder with every float32 constant off by up to a share of it."""
    proto, random = onnx.load(source / "model.onnx"), np.random.default_rng(seed)
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            exact = onnx.numpy_helper.to_array(tensor)
            moved = exact * (1 + share * random.uniform(-1, 1, exact.shape))
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    return _written(source, target, proto)


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
