"""H2: a caller's overrides of the folder's configuration are validated on a copy and applied whole or not at all."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxengine
import onnx_import
from onnx_import.sections import merged
from tests.onnx_import.reference import model

FOLDER = model("cpu-fp32")
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7396's MergePatch, written down as its pseudocode says: on a copy, one member after the other."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    target = copy.deepcopy(target) if isinstance(target, dict) else {}
    for name in patch:
        if patch[name] is None:
            if name in target:
                del target[name]
        else:
            target[name] = patched(target.get(name), patch[name])
    return target


@given(OBJECTS, OBJECTS)
def test_H2_overrides_merge_as_a_json_merge_patch(values: Any, patch: Any) -> None:
    before = copy.deepcopy((values, patch))
    assert merged(values, patch) == patched(values, patch)
    assert (values, patch) == before


@given(OBJECTS, OBJECTS)
def test_H2_an_override_given_twice_is_one_given_once(values: Any, patch: Any) -> None:
    once = merged(values, patch)
    assert merged(once, patch) == once


def test_H2_overrides_count_as_if_the_file_said_so(tmp_path: Path) -> None:
    """H2: read with overrides, and read from a folder whose file was changed, are the same; the file stays."""
    overrides = {
        "model": {
            "eos_token_id": [2, 7],
            "pad_token_id": None,
            "decoder": {"inputs": {"position_ids": "where"}},
        },
        "search": {"max_length": 100, "top_p": 0.5},
    }
    given, text = copy.deepcopy(overrides), (FOLDER / "genai_config.json").read_text()
    read = onnx_import.read_folder(FOLDER, MappingProxyType(overrides))
    assert overrides == given
    assert (FOLDER / "genai_config.json").read_text() == text

    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "genai_config.json").write_text(json.dumps(patched(json.loads(text), overrides)))
    written = onnx_import.read_folder(folder)
    assert read.config == written.config
    assert read.manifest == written.manifest
    plain = onnx_import.read_folder(FOLDER)
    assert (read.config.max_length, read.config.eos_token_ids, read.manifest.position_ids) == (
        100,
        (2, 7),
        "where",
    )
    assert (plain.config.max_length, plain.config.eos_token_ids) == (512, (2,))
    assert onnx_import.read_folder(FOLDER, {}) == plain


def test_H2_a_loaded_model_has_the_overrides() -> None:
    loaded = jaxengine.load_model(FOLDER, overrides={"search": {"max_length": 64}})
    assert loaded.config.max_length == 64
    assert loaded.decoder.identity == jaxengine.load_model(FOLDER).decoder.identity


class Odd:
    def __repr__(self) -> str:
        return "Odd()"


def looped() -> dict[str, Any]:
    values: dict[str, Any] = {}
    values["model"] = values
    return values


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"search": {"max_length": 64}, "model": {"vocab_size": 0}}, "key 'model.vocab_size' is 0, below 1"),
        ({"model": None}, "genai_config.json with the overrides given: key 'model' is missing"),
        (
            {"model": {"decoder": {"state_groups": [{"kind": "odd"}]}}},
            "state_groups[0].kind' is 'odd', not one of",
        ),
        (
            {"model": {"decoder": {"sliding_window": {"window_size": 0}}}},
            "sliding_window.window_size' is 0, below 1",
        ),
        ({"model": {"decoder": {"filename": "../model.onnx"}}}, "lies outside the model folder"),
        ({"search": {"top_p": Odd()}}, "The override 'search.top_p' is Odd(), which JSON has no form for."),
        (
            {"search": {"stops": ["a", {"b": Odd()}]}},
            "The override 'search.stops.b' is Odd(), which JSON has no form",
        ),
        ({"search": {1: 2}}, "The overrides have the key 1 in 'search'; keys are texts."),
        ({b"search": 2}, "The overrides have the key b'search' in their top; keys are texts."),
        (
            [("search", {})],
            "The overrides are [('search', {})]; give a mapping shaped like genai_config.json.",
        ),
        (looped(), "The overrides hold themselves, or are nested too deep."),
    ],
)
def test_H2_one_bad_override_refuses_all(overrides: Any, message: str) -> None:
    """H2, T2: with one sentence, which says that the overrides take part in it."""
    for load in (
        onnx_import.read_folder,
        lambda folder, given: jaxengine.load_model(folder, overrides=given),
    ):
        with pytest.raises(onnx_import.ImportFailure, match=re.escape(message)) as caught:
            load(FOLDER, overrides)
        assert "\n" not in str(caught.value)
    assert onnx_import.read_folder(FOLDER).config.max_length == 512
