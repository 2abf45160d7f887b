"""S1, G3: a head that the graph prunes gives every row that the caller wants; case C16's siblings in the importer."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import edited, logits, model

TOKENS = np.random.default_rng(5).integers(3, 320, 9).astype(np.int32)


def load(folder: Path) -> onnx_import.Decoder:
    return onnx_import.import_decoder(onnx_import.read_folder(folder))


def last_token_only(proto: onnx.ModelProto) -> None:
    """What the builder writes for a head that only sees the last token of each row."""
    head = proto.graph.node[-1]
    proto.graph.initializer.extend(
        [
            onnx.numpy_helper.from_array(np.array(-1, np.int64), "last"),
            onnx.numpy_helper.from_array(np.array([1], np.int64), "axis"),
        ]
    )
    gather = onnx.helper.make_node("Gather", [head.input[0], "last"], ["narrow"], name="prune", axis=1)
    unsqueeze = onnx.helper.make_node("Unsqueeze", ["narrow", "axis"], ["wide"], name="widen")
    head.input[0] = "wide"
    del proto.graph.node[-1]
    proto.graph.node.extend([gather, unsqueeze, head])


def chosen_rows_only(proto: onnx.ModelProto) -> None:
    """What the builder writes for a packed head that sees the rows of `logits_indices`."""
    head = proto.graph.node[-1]
    indices = onnx.helper.make_tensor_value_info("logits_indices", onnx.TensorProto.INT64, ["rows"])
    proto.graph.input.append(indices)
    gather = onnx.helper.make_node(
        "Gather", [head.input[0], "logits_indices"], ["chosen"], name="prune", axis=0
    )
    head.input[0] = "chosen"
    del proto.graph.node[-1]
    proto.graph.node.extend([gather, head])


@pytest.mark.parametrize(
    ("form", "prune"),
    [("cpu-fp32", last_token_only), ("paged-fp16", chosen_rows_only)],
    ids=["2-D", "packed"],
)
def test_S1_G3_a_pruned_head_gives_any_rows(tmp_path: Path, form: str, prune) -> None:
    whole = logits(load(model(form)), TOKENS)
    pruned = load(edited(model(form), tmp_path / "copy", prune))
    np.testing.assert_array_equal(logits(pruned, TOKENS), whole)
    rows = np.array([2, 8, 5])
    np.testing.assert_array_equal(logits(pruned, TOKENS, rows), logits(load(model(form)), TOKENS, rows))


def test_S2_another_choice_of_rows_is_refused(tmp_path: Path) -> None:
    """The first token instead of the last: nobody means the rows of a packed step."""

    def first_token_only(proto: onnx.ModelProto) -> None:
        last_token_only(proto)
        (last,) = (tensor for tensor in proto.graph.initializer if tensor.name == "last")
        last.CopyFrom(onnx.numpy_helper.from_array(np.array(0, np.int64), "last"))

    with pytest.raises(onnx_import.UnsupportedGraph, match="works across tokens"):
        load(edited(model("cpu-fp32"), tmp_path / "copy", first_token_only))
