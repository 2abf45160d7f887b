"""H1, H2, H3: what a configuration says about its decoder's state, checked against a graph of that shape."""

import copy
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onnx_import
from onnx_import.graph import Graph
from onnx_import.manifest import DecoderManifest
from onnx_import.states import geometry_problems
from tests.onnx_import.manifests import (
    HYBRID,
    LAYERS,
    PARTS,
    SHAPES,
    Owners,
    graph,
    manifest,
    refused,
    section,
)
from tests.onnx_import.reference import edited, model

Change = Callable[[dict[str, Any], Graph], None]


def layer_lists() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, LAYERS - 1), unique=True, min_size=1)


OWNERS = st.fixed_dictionaries(
    {"paged_kv": layer_lists()}, optional={"fixed_conv": layer_lists(), "fixed_recurrent": layer_lists()}
)


def tensors(found: DecoderManifest) -> Iterable[onnx_import.StateTensor]:
    return (tensor for group in found.state_groups for tensor in group.tensors)


@given(OWNERS, st.randoms(use_true_random=False))
def test_H1_every_state_is_found_under_its_own_layers_number(owners: Owners, random: Any) -> None:
    """H1, H2: any kinds over any layers in any order, gaps kept; a layer may own several, or none."""
    kinds = list(owners)
    random.shuffle(kinds)
    found = manifest(section({kind: owners[kind] for kind in kinds}), graph(owners))
    assert found.problems == found.notes == ()
    assert [(group.kind, list(group.layer_ids), group.derived) for group in found.state_groups] == [
        (kind, owners[kind], False) for kind in kinds
    ]
    expected = [
        (
            kind,
            layer,
            f"{'past_key_values' if kind == 'paged_kv' else 'past'}.{layer}.{part}",
            SHAPES[part][1:],
        )
        for kind in kinds
        for layer in owners[kind]
        for part in PARTS[kind]
    ]
    assert [(t.kind, t.layer, t.input, t.shape) for t in tensors(found)] == expected
    assert {t.output for t in tensors(found)} == graph(owners).outputs.keys() - {"logits"}
    assert found.fixed == tuple(t for t in tensors(found) if t.kind != "paged_kv")
    assert {t.dtype.name for t in found.fixed} <= {"float16", "float32"}


@given(OWNERS)
def test_H2_without_groups_they_follow_from_the_graph(owners: Owners) -> None:
    """H2: with fixed state in the graph every kind is derived, and told; without, paged state is dense."""
    hybrid = len(owners) > 1
    if not hybrid:
        owners = {"paged_kv": list(range(LAYERS))}
    values = section()
    kept = copy.deepcopy(values)
    found = manifest(values, graph(owners))
    assert values == kept
    assert found.declared is None
    assert found.problems == ()
    assert all(group.derived for group in found.state_groups)
    assert {group.kind: list(group.layer_ids) for group in found.state_groups} == {
        kind: sorted(layers) for kind, layers in owners.items()
    }
    assert len(found.notes) == hybrid
    assert all(repr(kind) in note for note in found.notes for kind in owners)


def test_H2_the_guessed_names_of_a_dense_cache_bind_nobody() -> None:
    """H2: without a manifest, other names and element types are for the operators to judge; fixed state is not."""
    of = graph(HYBRID)
    for name in [*of.inputs, *of.outputs]:
        if "key" in name or "value" in name:
            put(name, "uint8", None, 2, None, None)({}, of)
    drop("present.1.value")({}, of)
    found = manifest(section(), of)
    assert (found.problems, found.state_groups[0].tensors) == ((), ())
    drop("present.0.conv")({}, of)
    (problem,) = manifest(section(), of).problems
    assert "the graph has no output 'present.0.conv'" in problem


def test_H2_the_cache_has_the_type_of_its_first_key() -> None:
    groups = manifest(section(HYBRID), graph(HYBRID)).state_groups
    assert [group.dtype for group in groups] == [np.float16, np.float16, np.float32]


@pytest.mark.parametrize(
    ("groups", "key", "problem"),
    [
        ("all", "state_groups", "should be a list of objects"),
        ([7], "state_groups", "should be a list of objects"),
        ([{"layer_ids": [0]}], "state_groups[0].kind", "is missing"),
        (
            [{"kind": "paged", "layer_ids": [0]}],
            "state_groups[0].kind",
            "is 'paged', not one of paged_kv, fixed_co",
        ),
        ([{"kind": "paged_kv"}], "state_groups[0].layer_ids", "is missing"),
        ([{"kind": "paged_kv", "layer_ids": []}], "state_groups[0].layer_ids", "lists no layer"),
        (
            [{"kind": "paged_kv", "layer_ids": 1}],
            "state_groups[0].layer_ids",
            "should be a list of layers, not 1",
        ),
        (
            [{"kind": "paged_kv", "layer_ids": [True]}],
            "state_groups[0].layer_ids",
            "should be a list of layers",
        ),
        (
            [{"kind": "paged_kv", "layer_ids": [6]}],
            "state_groups[0].layer_ids",
            "holds 6, outside the 6 layers",
        ),
        ([{"kind": "paged_kv", "layer_ids": [-1]}], "state_groups[0].layer_ids", "holds -1, outside the 6"),
        ([{"kind": "paged_kv", "layer_ids": [3, 1, 3]}], "state_groups[0].layer_ids", "lists layer 3 twice"),
        (
            [{"kind": "fixed_conv", "layer_ids": [0, 1]}, {"kind": "fixed_conv", "layer_ids": [2, 1]}],
            "state_groups[1].layer_ids",
            "holds layer 1, whose 'fixed_conv' model.decoder.state_groups[0] lists too",
        ),
        (
            [
                {"id": "a", "kind": "paged_kv", "layer_ids": [0]},
                {"id": "a", "kind": "fixed_conv", "layer_ids": [1]},
            ],
            "state_groups[1].id",
            "is 'a', as that of an earlier group",
        ),
    ],
)
def test_H2_groups_that_say_something_impossible_are_refused(groups: Any, key: str, problem: str) -> None:
    refused(section(groups), key, problem)


@pytest.mark.parametrize("place", ["inputs", "outputs"])
@pytest.mark.parametrize("template", ["past", "past.%d.%d", "past.%s", "100%.%d", "%%d", 7, ""])
@pytest.mark.parametrize("part", ["key", "value", "conv", "recurrent"])
def test_H2_templates_hold_exactly_one_layer(place: str, template: Any, part: str) -> None:
    values = section(HYBRID)
    key = f"{'past' if place == 'inputs' else 'present'}_{part}_names"
    values[place][key] = template
    refused(values, f"{place}.{key}", "should " if template else "should be a text")


@pytest.mark.parametrize(
    ("place", "key"), [("inputs", "past_conv_names"), ("outputs", "present_recurrent_names")]
)
def test_H2_a_kind_without_names_is_refused(place: str, key: str) -> None:
    values = section(HYBRID)
    del values[place][key]
    refused(values, "", f"model.decoder.{place}.{key}' is missing")


def rename(place: str, key: str, template: str) -> Change:
    return lambda values, _: values[place].update({key: template})


def put(name: str, dtype: str, *shape: int | None) -> Change:
    """Give a value of the graph another type."""

    def change(_: dict[str, Any], of: Graph) -> None:
        place: Any = of.inputs if name in of.inputs else of.outputs
        place[name] = np.dtype(dtype), shape

    return change


def drop(name: str) -> Change:
    def change(_: dict[str, Any], of: Graph) -> None:
        place: Any = of.inputs if name in of.inputs else of.outputs
        del place[name]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            rename("inputs", "past_value_names", "past_key_values.%d.key"),
            "the name 'past_key_values.1.key' stands for both the state 'paged_kv' and the state 'paged_kv' of layer 1",
        ),
        (
            rename("outputs", "present_recurrent_names", "present.%d.conv"),
            "the name 'present.2.conv' stands for both the state 'fixed_conv' and the state 'fixed_recurrent' of",
        ),
        (
            rename("inputs", "input_ids", "past.0.conv"),
            "'past.0.conv' stands for both the tokens and the state",
        ),
        (
            drop("past_key_values.4.value"),
            "the graph has no input 'past_key_values.4.value', which the state group",
        ),
        (
            drop("present.4.conv"),
            "no output 'present.4.conv', which the state group 'fixed_conv' names for layer 4",
        ),
        (
            rename("inputs", "past_conv_names", "conv.%d"),
            "the graph has no input 'conv.0', which the state group",
        ),
        (rename("inputs", "past_conv_names", "conv.%d"), "names for layer 0 (and 2 more)"),
        (
            put("past_key_values.1.key", "uint8", None, None, 2, 16),
            "is uint8[?, ?, 2, 16]; its type should be",
        ),
        (
            put("past_key_values.1.key", "float16", None, 2, 16),
            "is float16[?, 2, 16]; a 'paged_kv' state has rank 4",
        ),
        (
            put("present.1.value", "float16", None, 2),
            "'present.1.value' of layer 1 is float16[?, 2]; a 'paged_kv'",
        ),
        (
            put("present.1.value", "float32", None, None, 2, 16),
            "'past_key_values.1.value' of layer 1 is float16[?, ?, 2, 16], but its successor 'present.1.value' is fl",
        ),
        (
            put("past_key_values.4.key", "float16", None, None, 1, 16),
            "'past_key_values.4.key' of layer 4 is float16[?, ?, 1, 16], unlike 'past_key_values.1.key' of float16",
        ),
        (
            put("present.4.value", "float16", None, None, 2, 8),
            "'present.4.value' of layer 4 is float16[?, ?, 2, 8]",
        ),
        (
            put("past.0.conv", "float16", 1, 64, 2),
            "is float16[1, 64, 2]; its batch axis should be dynamic, not 1",
        ),
        (put("past.0.conv", "float16", 0, 64, 2), "its batch axis should be dynamic, not 0"),
        (
            put("present.0.conv", "float16", 3, 64, 2),
            "'present.0.conv' of layer 0 is float16[3, 64, 2]; its batch",
        ),
        (put("past.0.conv", "float16", None, None, 2), "its axes after the batch should have fixed sizes"),
        (put("past.0.conv", "float16", None, 64, 0), "its axes after the batch should have fixed sizes"),
        (put("past.0.conv", "float16", None), "a 'fixed_conv' state has a batch axis and more"),
        (
            put("past.2.recurrent", "int64", None, 4, 8, 8),
            "is int64[?, 4, 8, 8]; its type should be one of float32",
        ),
        (
            put("present.2.recurrent", "float16", None, 4, 8, 8),
            "'past.2.recurrent' of layer 2 is float32[?, 4, 8, 8], but its successor 'present.2.recurrent' is float16",
        ),
        (
            put("present.0.conv", "float16", None, 64, 3),
            "but its successor 'present.0.conv' is float16[?, 64, 3]",
        ),
        (put("present.0.conv", "float16", None, 64), "but its successor 'present.0.conv' is float16[?, 64]"),
    ],
)
def test_H2_what_contradicts_the_graph_is_named(change: Change, problem: str) -> None:
    values, of = section(HYBRID), graph(HYBRID)
    assert manifest(values, of).problems == ()
    change(values, of)
    found = manifest(values, of)
    assert any(problem in text for text in found.problems), found.problems
    assert len(found.problems) <= 2


def test_H2_a_fault_that_all_tensors_share_is_told_briefly() -> None:
    of = graph(HYBRID)
    for name in of.inputs.keys() | of.outputs.keys():
        if "conv" in name:
            put(name, "int8", None, 64, 2)({}, of)
    problems = manifest(section(HYBRID), of).problems
    assert len(problems) == 4
    assert problems[-1] == "the state group 'fixed_conv' has 3 more faults of this kind"


@given(st.data())
def test_H2_open_axes_fit_any_geometry(data: st.DataObject) -> None:
    """H2: an axis that some tensors leave open constrains none, and two fixed sizes must agree."""
    of, sizes = graph(HYBRID), []
    for name in [*of.inputs, *of.outputs]:
        if "key" in name or "value" in name:
            size = data.draw(st.sampled_from([None, 8, 16]))
            sizes.append(size)
            put(name, "float16", None, None, 2, size)({}, of)
    uneven = len(set(sizes) - {None}) > 1
    assert [("one geometry" in text) for text in manifest(section(HYBRID), of).problems] == [True] * uneven


def test_H3_paged_groups_may_have_a_geometry_each() -> None:
    """H3: one geometry a group, which several groups need not share."""
    of = graph(HYBRID)
    for name in ("past_key_values.4.key", "past_key_values.4.value", "present.4.key", "present.4.value"):
        put(name, "float32", None, None, 1, 64)({}, of)
    groups = [{"kind": "paged_kv", "layer_ids": [1]}, {"kind": "paged_kv", "layer_ids": [4]}]
    found = manifest(section(groups), of)
    assert found.problems == ()
    assert [group.dtype for group in found.state_groups] == [np.float16, np.float32]


def spec(layer: int, heads: int, size: int, dtype: Any) -> onnx_import.AttentionSpec:
    return onnx_import.AttentionSpec(layer, 4, heads, size, 1.0, np.dtype(dtype))


@pytest.mark.parametrize(
    ("computed", "fits"),
    [
        ((2, 16, np.float16), True),
        ((2, 16, np.float32), False),
        ((4, 16, np.float16), False),
        ((2, 8, np.float16), False),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_H2_keys_fit_the_cache_that_the_graph_declares(computed: Any, fits: bool, dense: bool) -> None:
    of = graph(HYBRID)
    if dense:  # tokens have a batch axis, and heads come before positions
        put("input_ids", "int64", None, None)({}, of)
        for name in [*of.inputs, *of.outputs]:
            if "key" in name or "value" in name:
                put(name, "float16", None, 2, None, None if computed[1] == 16 else 16)({}, of)
    found = list(
        geometry_problems(manifest(section(HYBRID), of), of, [spec(4, *computed), spec(5, 9, 9, "int8")])
    )
    assert len(found) == (not fits)
    assert fits or "layer 4 computes keys of" in found[0]


def test_H2_problems_reach_the_importer_before_any_weight(tmp_path: Path) -> None:
    """H2, S2: a folder without its data file, whose manifest names a state that the graph lacks."""
    folder = edited(model("paged-fp16"), tmp_path / "copy", lambda proto: None)
    (folder / "model.onnx.data").unlink()
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["outputs"]["present_key_names"] = "next.%d.key"
    (folder / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(onnx_import.UnsupportedGraph, match=re.escape("no output 'next.0.key'")):
        onnx_import.import_decoder(onnx_import.read_folder(folder))


def test_H2_an_absent_manifest_means_dense_paged_state() -> None:
    """H2: derived for the 2-D form, read from the packed one."""
    derived, written = (onnx_import.inspect_folder(onnx_import.read_folder(model(form))).state_groups for form in
                        ("cpu-fp32", "paged-fp16"))  # fmt: skip
    for groups, assumed in ((derived, True), (written, False)):
        assert [(group.kind, group.layer_ids, group.derived) for group in groups] == [
            ("paged_kv", (0, 1), assumed)
        ]
    assert {tensor.shape for tensor in derived[0].tensors} == {(2, None, None)}
    assert {tensor.shape for tensor in written[0].tensors} == {(None, 2, 16)}


def test_H2_a_cache_of_another_type_than_its_keys_is_refused_without_weights(tmp_path: Path) -> None:
    """H2, S2: the graph declares float32 caches for layer 1, whose keys it computes in half precision."""

    def change(proto: onnx.ModelProto) -> None:
        for value in (*proto.graph.input, *proto.graph.output):
            if "key" in value.name or "value" in value.name:
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT

    folder = edited(model("paged-fp16"), tmp_path / "copy", change)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(
        onnx_import.UnsupportedGraph, match="layer 1 computes keys of float16 for 2 heads of 16"
    ):
        onnx_import.import_decoder(onnx_import.read_folder(folder))
