"""S2, S3, E6: graphs with rotary tables for short and for long sequences, chosen by each sequence's own limit."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import dense_attention, edited, model, runtime_logits
from tests.onnx_import.tables_by_length import THRESHOLD, choose, move_positions

TOKENS = np.random.default_rng(3).integers(3, 320, 48).astype(np.int32)


def load(folder: Path) -> onnx_import.Decoder:
    return onnx_import.import_decoder(onnx_import.read_folder(folder))


def logits(decoder: onnx_import.Decoder, tokens: np.ndarray, limit: int) -> np.ndarray:
    rows = np.arange(len(tokens), dtype=np.int32)
    limits = np.full(len(tokens), limit, np.int32)
    run = jax.jit(
        lambda params, *args: decoder.apply(params, *args[:2], dense_attention, args[1], limits=args[2])[0]
    )
    return np.asarray(run(decoder.params, tokens, rows, limits))


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("family", "edit"), [("llama", choose), ("qwen3", move_positions)])
def test_S3_each_limit_takes_the_table_that_the_runtime_takes(
    tmp_path: Path, family: str, edit: Callable
) -> None:
    """S2, S3: ONNX Runtime chooses by the batch's length; a sequence within its limit must get the same."""
    folder = edited(model("cpu-fp32", family), tmp_path / "copy", edit)
    decoder = load(folder)
    short, long = (runtime_logits(folder, TOKENS[:n]) for n in (THRESHOLD, THRESHOLD + 1))
    assert relative(logits(decoder, TOKENS[:THRESHOLD], THRESHOLD), short) < 1e-4
    for limit in (THRESHOLD + 1, 512):
        assert relative(logits(decoder, TOKENS[: THRESHOLD + 1], limit), long) < 1e-4
    assert relative(long[:THRESHOLD], short) > 0.1


def test_S3_the_packed_form_chooses_alike(tmp_path: Path) -> None:
    """S1, S3: the length is the table's columns times the block size there; half precision, see test_logits.py."""
    reference = edited(model("cpu-fp32"), tmp_path / "cpu-fp32", choose)
    decoder = load(edited(model("paged-fp16"), tmp_path / "paged-fp16", choose))
    for count, limit in ((THRESHOLD, THRESHOLD), (48, 48)):
        expected = runtime_logits(reference, TOKENS[:count])
        difference = np.abs(logits(decoder, TOKENS[:count], limit) - expected) / np.abs(expected).max()
        assert difference.mean() < 2**-11 * np.sqrt(2 * 20)
        assert difference.max() < 0.03


@pytest.mark.parametrize(("family", "edit"), [("llama", choose), ("qwen3", move_positions)])
def test_E6_a_sequence_is_not_moved_by_the_limits_of_others(
    tmp_path: Path, family: str, edit: Callable
) -> None:
    """Two limits in one step: each token as if all had its own."""
    decoder = load(edited(model("cpu-fp32", family), tmp_path / "copy", edit))

    def own_token(spec, query, key, value):  # type: ignore[no-untyped-def]
        return query, None

    positions = np.arange(8, dtype=np.int32)
    run = jax.jit(
        lambda *args: decoder.apply(decoder.params, *args[:2], own_token, args[2], limits=args[3])[0]
    )
    limits = np.array([32, 33, 512, 1, 32, 33, 512, 31], np.int32)
    mixed = np.asarray(run(TOKENS[:8], positions, positions, limits))
    for limit in (32, 512):
        uniform = np.asarray(run(TOKENS[:8], positions, positions, np.full(8, limit, np.int32)))
        mine = (limits > THRESHOLD) == (limit > THRESHOLD)
        np.testing.assert_array_equal(mixed[mine], uniform[mine])
        assert (mixed[~mine][:, 0] != uniform[~mine][:, 0]).any()


@pytest.mark.parametrize(
    "edit",
    [
        lambda proto: choose(proto, index=0),
        lambda proto: choose(proto, compare="Less"),
    ],
    ids=["batch size", "less"],
)
def test_S2_other_choices_are_refused_by_name(tmp_path: Path, edit: Callable) -> None:
    with pytest.raises(onnx_import.UnsupportedGraph, match=r"ai.onnx::If \(node '/If'\) isn't supported"):
        load(edited(model("cpu-fp32"), tmp_path / "copy", edit))


def test_S2_a_short_table_below_the_threshold_is_refused(tmp_path: Path) -> None:
    def shrink(proto: onnx.ModelProto) -> None:
        choose(proto)
        constant = next(node for node in proto.graph.node if list(node.output) == ["/threshold"])
        constant.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array(THRESHOLD + 1)))

    with pytest.raises(onnx_import.UnsupportedGraph, match=r"TablesByLength.*chooses at 33 tokens"):
        load(edited(model("cpu-fp32"), tmp_path / "copy", shrink))


@pytest.mark.parametrize("options", [{"moved": 31}, {"source": "input_ids"}], ids=str)
def test_S2_positions_moved_in_another_way_are_refused_by_name(tmp_path: Path, options: dict) -> None:
    """An extreme over all packed tokens would let one sequence move another."""
    edit = functools.partial(move_positions, **options)
    with pytest.raises(onnx_import.UnsupportedGraph, match=r"\(node '/longest'\)"):
        load(edited(model("cpu-fp32", "qwen3"), tmp_path / "copy", edit))


def test_S2_limits_must_be_given_where_they_choose(tmp_path: Path) -> None:
    decoder = load(edited(model("cpu-fp32"), tmp_path / "copy", choose))
    rows = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="`limits` must be given"):
        decoder.apply(decoder.params, rows, rows, dense_attention, rows)
