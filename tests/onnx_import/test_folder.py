"""T2, case C19: a folder's configuration, whose every refusal is one sentence naming file and key."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnx_import
from tests.onnx_import.reference import edited, model

Change = Callable[[dict[str, Any]], None]


def folder_with(tmp_path: Path, change: Change, generation: dict[str, Any] | None = None) -> Path:
    """A copy of a model folder whose configuration was changed."""
    folder = tmp_path / "model"
    shutil.copytree(model("cpu-fp32"), folder)
    file = folder / "genai_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def config_with(
    tmp_path: Path, change: Change, generation: dict[str, Any] | None = None
) -> onnx_import.FolderConfig:
    return onnx_import.read_folder(folder_with(tmp_path, change, generation)).config


def put(path: str, value: Any) -> Change:
    """Set the value at a dotted path; None removes it."""
    *sections, last = path.split(".")

    def change(config: dict[str, Any]) -> None:
        for section in sections:
            config = config[section]
        if value is None:
            del config[last]
        else:
            config[last] = value

    return change


@pytest.mark.parametrize(("value", "expected"), [(2, (2,)), ([2], (2,)), ([2, 1, 2], (2, 1))])
def test_case_C19_an_eos_id_and_a_list_are_the_same(tmp_path: Path, value: Any, expected: tuple[int]) -> None:
    assert config_with(tmp_path, put("model.eos_token_id", value)).eos_token_ids == expected


def test_case_C19_eos_only_in_the_generation_config(tmp_path: Path) -> None:
    config = config_with(tmp_path, put("model.eos_token_id", None), {"eos_token_id": [7, 9]})
    assert config.eos_token_ids == (7, 9)
    assert any("generation_config.json" in note for note in config.notes)


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        ({"eos_token_id": 320}, "key 'eos_token_id' holds 320, outside the vocabulary of 320"),
        ({"eos_token_id": "</s>"}, "key 'eos_token_id' should be a token id or a list of them, not '</s>'"),
        ([], "should hold one JSON object"),
    ],
)
def test_case_C19_a_bad_generation_config_is_named_itself(
    tmp_path: Path, generation: Any, problem: str
) -> None:
    """Case C19: it is read where the model section has no end-of-sequence id, and only there."""
    folder = folder_with(tmp_path, put("model.eos_token_id", None), generation)
    with pytest.raises(onnx_import.FolderError, match=re.escape(problem)) as caught:
        onnx_import.read_folder(folder)
    assert str(folder / "generation_config.json") in str(caught.value)
    plain = folder_with(tmp_path / "plain", put("model.eos_token_id", 2), generation)
    assert onnx_import.read_folder(plain).config.eos_token_ids == (2,)


@pytest.mark.parametrize("value", ["absent", [], "null"])
def test_case_C19_no_eos_anywhere_is_noted(tmp_path: Path, value: Any) -> None:
    def change(config: dict[str, Any]) -> None:
        config["model"]["eos_token_id"] = None if value == "null" else value
        if value == "absent":
            del config["model"]["eos_token_id"]

    config = config_with(tmp_path, change)
    assert config.eos_token_ids == ()
    assert any("model.eos_token_id" in note for note in config.notes)


def test_case_C19_nothing_follows_from_the_models_type(tmp_path: Path) -> None:
    """Case C19, H1: a wrong or unknown type changes neither what is read nor what is run."""
    folder = folder_with(tmp_path, put("model.type", "whisper of the west"))
    plain = onnx_import.read_folder(model("cpu-fp32"))
    read = onnx_import.read_folder(folder)
    assert read.config == dataclasses.replace(plain.config, model_type="whisper of the west")
    assert read.manifest == plain.manifest
    assert onnx_import.inspect_folder(read).unsupported == ()


@pytest.mark.parametrize("value", [[3, 4], 320, -1])
def test_case_C19_odd_pad_ids_are_tolerated_with_a_note(tmp_path: Path, value: Any) -> None:
    config = config_with(tmp_path, put("model.pad_token_id", value))
    assert config.pad_token_id == (3 if isinstance(value, list) else None)
    assert any("model.pad_token_id" in note for note in config.notes)


def test_case_C19_unknown_keys_are_tolerated_with_a_note(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["extra"] = 1
        config["model"]["decoder"]["novelty"] = {}

    notes = config_with(tmp_path, change).notes
    assert [re.findall(r"key '([^']*)'", note) for note in notes] == [["extra"], ["model.decoder.novelty"]]


def test_case_C19_a_missing_search_section_means_defaults(tmp_path: Path) -> None:
    config = config_with(tmp_path, put("search", None))
    assert (config.max_length, dict(config.search)) == (512, {})
    assert any("'search'" in note for note in config.notes)


@pytest.mark.parametrize(("value", "expected"), [(100, 100), (512, 512), (4096, 512), (None, 512)])
def test_A5_max_length_is_capped_by_the_context(tmp_path: Path, value: Any, expected: int) -> None:
    assert config_with(tmp_path, put("search.max_length", value)).max_length == expected


def test_a_plain_folder_reads_without_notes() -> None:
    """S1."""
    config = onnx_import.read_folder(model("cpu-fp32")).config
    assert (config.model_type, config.vocab_size, config.context_length) == ("llama", 320, 512)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    assert config.search["top_k"] == 50
    assert config.notes == ()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (put("model", None), "'model' is missing"),
        (put("model", []), "'model' isn't an object"),
        (put("model.type", None), "'model.type' is missing"),
        (put("model.type", 7), "'model.type' should be a text, not 7"),
        (put("model.vocab_size", None), "'model.vocab_size' is missing"),
        (put("model.vocab_size", "320"), "'model.vocab_size' should be an integer, not '320'"),
        (put("model.context_length", 0), "'model.context_length' is 0, below 1"),
        (put("model.eos_token_id", 320), "'model.eos_token_id' holds 320, outside the vocabulary of 320"),
        (put("model.eos_token_id", [2, "x"]), "'model.eos_token_id' should be a token id or a list of them"),
        (put("model.decoder", None), "'model.decoder' is missing"),
        (put("model.decoder.filename", None), "'model.decoder.filename' is missing"),
        (
            put("model.decoder.num_hidden_layers", True),
            "'model.decoder.num_hidden_layers' should be an integer",
        ),
        (put("model.decoder.inputs.past_key_names", "past"), "should hold exactly one %d"),
        (
            put("model.decoder.state_groups", [{"kind": "odd"}]),
            "'model.decoder.state_groups[0].kind' is 'odd'",
        ),
        (
            put("model.decoder.state_groups", [{"kind": "paged_kv", "layer_ids": [0, 0]}]),
            "lists layer 0 twice",
        ),
        (
            put("model.decoder.state_groups", [{"kind": "paged_kv", "layer_ids": [5]}]),
            "holds 5, outside the 2",
        ),
        (put("search.max_length", "long"), "'search.max_length' should be an integer"),
    ],
)
def test_case_C19_wrong_values_name_file_and_key(tmp_path: Path, change: Change, key: str) -> None:
    """T2, case C19, H2."""
    folder = folder_with(tmp_path, change)
    with pytest.raises(onnx_import.FolderError, match=re.escape(key)) as caught:
        onnx_import.read_folder(folder)
    assert str(folder / "genai_config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("provider", "option"),
    [
        ("webgpu", "multiRotaryCacheConcatOffset"),
        ("NvTensorRtRtx", "multi_rotary_cache_concat_offset"),
        ("NvTensorRtRtx", "nv_multi_rotary_cache_concat_offset"),
    ],
)
def test_case_C14_tables_between_which_only_a_provider_chooses_are_refused(
    tmp_path: Path, provider: str, option: str
) -> None:
    """Case C14, S2: the graph would read the rows of the long factors as if they followed those of the short ones."""
    providers = [{"cuda": {}}, {provider: {"enable_cuda_graph": "1", option: "32"}}]
    folder = folder_with(tmp_path, put("model.decoder.session_options.provider_options", providers))
    key = f"model.decoder.session_options.provider_options[1].{provider}.{option}"
    with pytest.raises(onnx_import.FolderError, match=re.escape(f"key {key!r} is '32'")):
        onnx_import.read_folder(folder)


@pytest.mark.parametrize("value", ["0", 0, "absent"])
def test_case_C14_a_provider_without_such_tables_changes_nothing(tmp_path: Path, value: Any) -> None:
    options = {"enableGraphCapture": "1"} | (
        {} if value == "absent" else {"multiRotaryCacheConcatOffset": value}
    )
    change = put("model.decoder.session_options.provider_options", [{"webgpu": options}])
    assert config_with(tmp_path, change) == onnx_import.read_folder(model("cpu-fp32")).config


def test_T2_missing_and_broken_folders(tmp_path: Path) -> None:
    """T2: a missing folder, a file, a folder without a config, broken JSON, JSON that isn't an object."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, text in (("broken", '{"model": '), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "genai_config.json").write_text(text)
    expected = {
        "absent": "doesn't exist",
        "file": "is a file",
        "empty": "has no genai_config.json",
        "broken": "isn't valid JSON (line 1",
        "list": "should hold one JSON object",
    }
    for name, message in expected.items():
        with pytest.raises(onnx_import.FolderError, match=re.escape(message)) as caught:
            onnx_import.read_folder(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, b"", b"not an ONNX file", b"version https://git-lfs.github.com/spec/v1\n", b"\x08\x0a"]
)
def test_T2_a_missing_or_unreadable_model_file(tmp_path: Path, content: bytes | None) -> None:
    folder = folder_with(tmp_path, put("search.max_length", 8))
    file = folder / "model.onnx"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(onnx_import.FolderError, match=r"model\.onnx"):
        onnx_import.read_folder(folder)


def test_S4_a_model_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, put("model.decoder.filename", "../elsewhere.onnx"))
    shutil.copy(folder / "model.onnx", tmp_path / "elsewhere.onnx")
    with pytest.raises(onnx_import.FolderError, match="lies outside the model folder"):
        onnx_import.read_folder(folder)


@pytest.mark.parametrize("name", ["nul\0.onnx", "loop.onnx", "x" * 300], ids=["nul", "loop", "long"])
def test_T2_a_model_file_that_no_path_leads_to(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, put("model.decoder.filename", name))
    (folder / "loop.onnx").symlink_to("loop.onnx")
    with pytest.raises(onnx_import.FolderError, match=r"model file|readable ONNX file"):
        onnx_import.read_folder(folder)


@pytest.mark.parametrize("place", ["input", "output"])
def test_T2_a_value_without_a_tensor_type_is_named(tmp_path: Path, place: str) -> None:
    def change(proto: onnx.ModelProto) -> None:
        getattr(proto.graph, place)[0].ClearField("type")

    folder = edited(model("cpu-fp32"), tmp_path / "copy", change)
    name = {"input": "input_ids", "output": "logits"}[place]
    with pytest.raises(onnx_import.FolderError, match=f"model.onnx gives its value '{name}' no tensor type"):
        onnx_import.read_folder(folder)


def _without_outputs(proto: onnx.ModelProto) -> None:
    proto.graph.node[5].ClearField("output")


def _without_first_output(proto: onnx.ModelProto) -> None:
    proto.graph.node[5].output[0] = ""


def _of_unknown_type(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].data_type = 99


def _without_data(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].data_location = onnx.TensorProto.DEFAULT


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without_outputs, "without a first output"),
        (_without_first_output, "without a first output"),
        (_of_unknown_type, "has the element type 99"),
        (_without_data, "doesn't fit its data"),
    ],
)
def test_T2_a_graph_that_is_not_whole_is_one_sentence(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], problem: str
) -> None:
    """T2, S2: nodes without results, and tensors of no type or without their numbers."""
    with pytest.raises(onnx_import.ImportFailure, match=problem) as caught:
        onnx_import.read_folder(edited(model("cpu-fp32"), tmp_path / "copy", change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op_type", ["Gather", "Transpose", "Reshape", "Unsqueeze"])
def test_T2_a_node_without_inputs_is_named(tmp_path: Path, op_type: str) -> None:
    """T2, S2: the rewrites that look for such nodes leave one without inputs to be refused."""

    def change(proto: onnx.ModelProto) -> None:
        node = next(node for node in proto.graph.node if "embed" in node.name)
        node.op_type = op_type
        del node.input[:], node.attribute[:]

    folder = edited(model("cpu-fp32"), tmp_path / "copy", change)
    with pytest.raises(onnx_import.UnsupportedGraph, match=f"::{op_type} .* lacks its input"):
        onnx_import.import_decoder(onnx_import.read_folder(folder))


def test_T2_a_model_file_of_another_format(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, put("model.decoder.filename", "genai_config.json"))
    with pytest.raises(onnx_import.FolderError, match="isn't a readable ONNX file"):
        onnx_import.read_folder(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model": ' + "9" * 5000 + "}"])
def test_case_C19_json_that_python_will_not_hold(tmp_path: Path, text: str) -> None:
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(onnx_import.FolderError, match=r"genai_config\.json can't be read as JSON"):
        onnx_import.read_folder(tmp_path)


def test_T2_a_folder_name_that_no_file_can_have() -> None:
    with pytest.raises(onnx_import.FolderError, match="doesn't exist"):
        onnx_import.read_folder("x" * 5000)


def test_case_C19_a_layer_count_beyond_reason_costs_no_memory(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, put("model.decoder.num_hidden_layers", 1_000_000_000))
    with pytest.raises(onnx_import.FolderError, match="num_hidden_layers' is 1000000000, above 10000"):
        onnx_import.read_folder(folder)


def test_S2_many_missing_layers_are_one_short_problem(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, put("model.decoder.num_hidden_layers", 99))
    with pytest.raises(onnx_import.UnsupportedGraph) as caught:
        onnx_import.import_decoder(onnx_import.read_folder(folder))
    assert caught.value.problems == ("layer 2, 3, 4, 5, 6 and more has no attention in the graph",)


def test_case_C21_a_renamed_model_file_still_finds_its_data(tmp_path: Path, monkeypatch: Any) -> None:
    """Case C21: data is found beside the model by its stored name, from any working directory."""
    folder = folder_with(tmp_path, put("model.decoder.filename", "renamed.onnx"))
    (folder / "model.onnx").rename(folder / "renamed.onnx")
    monkeypatch.chdir(tmp_path)
    assert onnx_import.import_decoder(onnx_import.read_folder("model")).vocab_size == 320


@pytest.mark.parametrize(
    ("engine", "static"),
    [
        ({}, False),
        ({"static_batching": {"max_batch_size": 4}}, True),
        ({"dynamic_batching": {}}, False),
        ({"static_batching": {}, "dynamic_batching": {}}, False),
    ],
)
def test_O1_a_folder_may_ask_for_a_static_batch(tmp_path: Path, engine: dict[str, Any], static: bool) -> None:
    assert config_with(tmp_path, put("engine", engine)).static_batching is static
