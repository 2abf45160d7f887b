"""`jaxengine inspect` says what the importer sees, for people and for scripts."""

import json

from jaxengine.cli import main
from onnx_import import inspect_folder, read_folder


def test_S2_json_holds_the_importers_report(tiny, capsys):
    assert main(["inspect", str(tiny), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    report = inspect_folder(read_folder(tiny))
    assert {(op["domain"], op["type"]): op["count"] for op in seen["operators"]} == dict(report.operators)
    assert seen["weight_bytes"] == report.weight_bytes == sum(seen["weight_bytes_by_type"].values())
    assert seen["state_groups"] == [{"kind": "paged_kv", "layers": [0, 1], "assumed": True}]
    assert (seen["unsupported"], seen["model_type"], seen["context_length"]) == ([], "llama", 1024)


def test_T1_the_table_names_operators_state_and_bytes(tiny, capsys):
    assert main(["inspect", str(tiny)]) == 0
    out, err = capsys.readouterr()
    report = inspect_folder(read_folder(tiny))
    assert f"{report.weight_bytes:,} bytes" in out
    assert "layers 0-1" in out
    for domain, operator in report.operators:
        assert f"{domain or 'ai.onnx'}.{operator}" in out
    assert "unsupported" not in out
    assert err == ""


def test_T2_what_is_unsupported_and_what_was_tolerated_is_listed(tiny, tmp_path, capsys):
    import onnx

    from tests.cli.tiny_model import variant

    folder = variant(tiny, tmp_path / "odd")
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    graph.graph.node[-1].op_type = "Twiddle"
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    config = json.loads((folder / "genai_config.json").read_text()) | {"surprise": 1}
    (folder / "genai_config.json").write_text(json.dumps(config))
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Twiddle" in out.split("unsupported")[1]
    assert "surprise" in out.split("notes")[1]
