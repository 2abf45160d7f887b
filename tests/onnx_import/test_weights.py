"""S4, case C21: external data is checked before it is read, and never leaves the model folder."""

import dataclasses
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import onnx_import
from onnx_import import lazy
from onnx_import.loading import load_params
from onnx_import.plan import make_plan, survey
from onnx_import.registry import WeightPlan
from onnx_import.weights import WeightFiles
from tests.onnx_import.reference import edited, logits, model

DATA = "model.onnx.data"
TOKENS = np.arange(5, 15, dtype=np.int32)


def entry(name: str, value: str) -> Callable[[onnx.ModelProto], None]:
    """Set one entry of the external data of the last norm."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if "final_norm" in t.name)
        found = [item for item in tensor.external_data if item.key == name]
        (found[0] if found else tensor.external_data.add(key=name)).value = value

    return change


def refusal(folder: Path) -> str:
    """The one sentence with which an import fails."""
    with pytest.raises(onnx_import.WeightError) as caught:
        onnx_import.import_decoder(onnx_import.read_folder(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(model("cpu-fp32"), tmp_path / "model")


def test_S4_a_missing_data_file_is_named(folder: Path) -> None:
    (folder / DATA).unlink()
    assert "needs the data file" in refusal(folder)
    assert str(folder / DATA) in refusal(folder)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_S4_a_truncated_data_file_is_named(folder: Path, size: int) -> None:
    """S4, case C21: with the tensor that isn't all there, and before any weight is read."""
    os.truncate(folder / DATA, size)
    assert "which holds" in refusal(folder)
    assert str(folder / DATA) in refusal(folder)
    assert "Tensor 'model." in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offset", "99999999", "at bytes 99999999 to 100000383"),
        ("offset", "-4", "at bytes -4 to 380"),
        ("length", "8", "needs 384 bytes, but 8 are declared"),
        ("location", "absent.data", "which doesn't exist"),
        ("location", "../outside.data", "outside the model folder"),
        ("location", "/etc/hostname", "outside the model folder"),
        ("location", "", "outside the model folder"),
        ("location", "link.data", "outside the model folder"),
    ],
)
def test_case_C21_bad_references_are_refused_by_tensor(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    """Case C21, S4: offsets past the end, wrong lengths, and locations that leave the folder, links too."""
    folder = edited(model("cpu-fp32"), tmp_path / "model", entry(name, value))
    shutil.copy(folder / DATA, tmp_path / "outside.data")
    (folder / "link.data").symlink_to(tmp_path / "outside.data")
    assert message in refusal(folder)
    assert "final_norm" in refusal(folder)


def test_case_C21_data_is_found_by_its_stored_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C21: beside the model, in folders below, and at odd offsets; whatever lies in the working directory."""
    plain = model("cpu-fp32")
    tensor = next(
        t for t in onnx_import.read_folder(plain).graph.tensors.values() if "final_norm" in t.source
    )
    values = (plain / DATA).read_bytes()[tensor.offset : tensor.offset + tensor.length]

    def change(proto: onnx.ModelProto) -> None:
        entry("location", "below/further.bin")(proto)
        entry("offset", "3")(proto)

    folder = edited(plain, tmp_path / "model", change)
    (folder / "below").mkdir()
    (folder / "below" / "further.bin").write_bytes(b"odd" + values)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "below").mkdir(parents=True)
    (elsewhere / "below" / "further.bin").write_bytes(bytes(3 + len(values)))
    (elsewhere / DATA).write_bytes(b"")
    (elsewhere / "link").symlink_to(folder)
    monkeypatch.chdir(elsewhere)
    expected = logits(onnx_import.import_decoder(onnx_import.read_folder(plain)), TOKENS)
    for path in (folder, Path("link"), Path("..") / "model"):
        found = logits(onnx_import.import_decoder(onnx_import.read_folder(path)), TOKENS)
        np.testing.assert_array_equal(found, expected)


def test_case_C21_a_folder_in_the_place_of_data_is_named(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).mkdir()
    assert f"needs the data file {folder / DATA}, which is no file" in refusal(folder)


def test_case_C21_an_offset_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = edited(model("cpu-fp32"), tmp_path / "model", entry("offset", "many"))
    assert "isn't an integer" in refusal(folder)


def test_case_C21_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / DATA).rename(folder / "real.data")
    (folder / DATA).symlink_to("real.data")
    assert onnx_import.import_decoder(onnx_import.read_folder(folder)).vocab_size == 320


def test_S4_data_inside_the_graph_gives_the_same_logits(folder: Path) -> None:
    """S4: initializers in the file itself, as small models have them."""
    outside = onnx_import.import_decoder(onnx_import.read_folder(folder))
    proto = onnx.load(folder / "model.onnx")
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / DATA).unlink()
    inside = onnx_import.import_decoder(onnx_import.read_folder(folder))
    np.testing.assert_array_equal(logits(inside, TOKENS), logits(outside, TOKENS))


PIECE = 64 * 64 * 2
"""Elements of two blocks of these models' widest products."""


@pytest.mark.parametrize(
    ("form", "weights"), [("cpu-fp32", "exact"), ("cpu-int4", "exact"), ("cpu-int4", "fast")]
)
def test_S4_a_weight_is_made_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, form: str, weights: onnx_import.WeightMode
) -> None:
    """S4: while a piece is made the one before is left at most, and no piece is longer than asked; all else is a view.

    The parameters are those of the arrays made in one go.
    """
    monkeypatch.setattr(lazy, "_PIECE", PIECE)
    folder = onnx_import.read_folder(model(form))
    plan = make_plan(folder.graph, folder.manifest, survey(folder.graph, folder.manifest), weights)
    files = WeightFiles(folder.graph)
    made: list[weakref.ref] = []
    lazy_leaves = 0

    def watched(leaf: np.ndarray | lazy.LazyArray) -> np.ndarray | lazy.LazyArray:
        if not isinstance(leaf, lazy.LazyArray):
            assert not leaf.flags.owndata or leaf.nbytes < 4 * PIECE
            return leaf

        nonlocal lazy_leaves
        lazy_leaves += 1

        def rows(start: int, stop: int) -> np.ndarray:
            assert sum(ref() is not None for ref in made) <= 1
            piece = np.copy(leaf[start:stop])
            assert piece.size <= max(PIECE, piece[:1].size)
            made.append(weakref.ref(piece))
            return piece

        return lazy.LazyArray(leaf.shape, leaf.dtype, rows)

    def watching(weight: WeightPlan) -> WeightPlan:
        return dataclasses.replace(weight, build=lambda *arrays: jax.tree.map(watched, weight.build(*arrays)))

    watching_plan = dataclasses.replace(plan, weights={key: watching(w) for key, w in plan.weights.items()})
    params = load_params(watching_plan, files)
    assert params.keys() == plan.weights.keys()
    assert len(made) > lazy_leaves > 0
    for key, weight in plan.weights.items():
        whole = jax.tree.map(np.asarray, weight.build(*(files.read(tensor) for tensor in weight.sources)))
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), params[key])
        assert shapes == weight.struct
        jax.tree.map(np.testing.assert_array_equal, params[key], whole)


@given(
    arrays.arrays(np.int32, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)),
    st.integers(1, 30),
)
def test_S4_pieces_are_the_array(whole: np.ndarray, piece: int) -> None:
    """S4: of any shape, empty ones too; in order, without a gap."""
    array = lazy.LazyArray(whole.shape, whole.dtype, lambda start, stop: whole[start:stop])
    copy = np.full_like(whole, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy, "_PIECE", piece)
        pieces = list(array.pieces())
    for rows, part in pieces:
        copy[rows] = part
    assert sum(len(part) for _, part in pieces) == len(whole)
    assert all(part.size <= max(piece, part[:1].size) for _, part in pieces)
    np.testing.assert_array_equal(copy, whole)
    np.testing.assert_array_equal(np.asarray(array), whole)


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="reads how many pages are mapped from Linux's /proc"
)
def test_S4_a_loaded_model_keeps_no_page_of_its_file(folder: Path) -> None:
    """S4: what was read of the file is given back, and can be read again."""
    read = onnx_import.read_folder(folder)
    plan = make_plan(read.graph, read.manifest, survey(read.graph, read.manifest), "exact")
    files = WeightFiles(read.graph)
    tensor = max(plan.tensors, key=lambda tensor: tensor.nbytes)
    view = files.read(tensor)
    before = view.copy()
    assert resident_bytes(folder / DATA) >= tensor.nbytes
    load_params(plan, files)
    assert resident_bytes(folder / DATA) == 0
    np.testing.assert_array_equal(view, before)


def resident_bytes(file: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    sections = Path("/proc/self/smaps").read_text().split(f" {file}\n")[1:]
    return sum(int(re.search(r"Rss: +(\d+) kB", section)[1]) * 1024 for section in sections)  # type: ignore[index]


def test_weights_outlive_the_file(folder: Path) -> None:
    """S4: parameters are copies, so a file that changes later can't change or crash a loaded model."""
    decoder = onnx_import.import_decoder(onnx_import.read_folder(folder))
    before = logits(decoder, TOKENS)
    with (folder / DATA).open("r+b") as file:
        file.write(b"\xff" * (folder / DATA).stat().st_size)
    np.testing.assert_array_equal(logits(decoder, TOKENS), before)


def test_identity_tells_models_apart(folder: Path) -> None:
    """Same folder, same identity; other weights of the same sizes, or held another way, another one."""
    identities = {
        onnx_import.import_decoder(onnx_import.read_folder(model("cpu-int4", family)), weights).identity
        for family in ("llama", "mistral")
        for weights in ("exact", "fast")
    }
    assert len(identities) == 4
    first = onnx_import.import_decoder(onnx_import.read_folder(folder)).identity
    assert onnx_import.import_decoder(onnx_import.read_folder(model("cpu-fp32"))).identity == first
    with (folder / DATA).open("r+b") as file:
        file.write(b"\x01\x02\x03\x04")
    assert onnx_import.import_decoder(onnx_import.read_folder(folder)).identity != first
