"""Every benchmark runs at a tiny size and its JSON has the promised form; no timing is judged."""

import json
import math
import shutil

import numpy as np
import pytest

from benchmarks import (
    attention_kernels,
    decode_throughput,
    fairness,
    gpu_decode,
    guidance_cost,
    host_time,
    load_memory,
    pool_scatter,
    report,
    sampling_cost,
    speculation,
    weight_accuracy,
)
from jaxengine.demo.convert import convert
from jaxengine.demo.progress import silent
from tests.demo.synthetic import write_tiny_gguf
from tests.onnx_import.reference import model

FIGURE = (int, float)
MAINS = {
    "decode_throughput": (decode_throughput.main, ["--folder", str(model("cpu-int4"))]),
    "weight_accuracy": (weight_accuracy.main, ["--int4", str(model("cpu-int4"))]),
    "pool_scatter": (pool_scatter.main, ["--pool-mib", "1"]),
    "host_time": (host_time.main, []),
    "fairness": (fairness.main, ["--loads", "1"]),
    "sampling_cost": (sampling_cost.main, ["--folder", str(model("cpu-int4"))]),
    "guidance_cost": (guidance_cost.main, []),
    "speculation": (speculation.main, []),
    "load_memory": (load_memory.main, ["--folder", str(model("cpu-int4"))]),
    "attention_kernels": (attention_kernels.main, []),
    "gpu_decode": (gpu_decode.main, []),
}


def run(name, tmp_path, capsys, *options):
    """The JSON of a run, whose table must name every row."""
    main, required = MAINS[name]
    file = tmp_path / "result.json"
    assert main([*required, "--json", str(file), *options]) == 0
    record = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == len(record["rows"]) + 2
    assert record["benchmark"] == name
    machine = record["machine"]
    assert machine["cores"] >= 1
    assert machine["processor"]
    assert set(machine["features"]) <= set(report.FEATURES)
    assert {"jax", "numpy", "onnxruntime"} <= set(machine["packages"])
    return record


def check_figures(row, names):
    for name in names:
        assert isinstance(row[name], FIGURE), name
        assert math.isfinite(row[name]), name


@pytest.mark.slow
def test_decode_throughput(tmp_path, capsys):
    folder = ["--folder", str(model("cpu-fp32")), "--weights", "both"]
    sizes = ["--batch", "1", "3", "--prompt-tokens", "9", "--new-tokens", "12", "--turns", "2"]
    record = run("decode_throughput", tmp_path, capsys, *folder, *sizes)
    assert record["settings"] == {"folder": "llama", "prompt_tokens": 9, "new_tokens": 12, "turns": 2}
    names = ["jaxengine exact", "jaxengine fast", "ONNX Runtime GenAI"]
    assert [(row["batch"], row["contender"]) for row in record["rows"]] == [
        (b, name) for b in (1, 3) for name in names
    ]
    ratios = ("decode_ratio", "prefill_speed_ratio", "decode_cpu_ratio")
    for row in record["rows"]:
        check_figures(row, ("decode_tokens_per_second", "prefill_seconds", *ratios))
        assert len(row["turns"]) == 2
        for turn in row["turns"]:
            check_figures(
                turn, ("decode_tokens_per_second", "prefill_seconds", "cpu_seconds", "idle_cpu_seconds")
            )
        if row["contender"] == "ONNX Runtime GenAI":
            assert [row[name] for name in ratios] == [1, 1, 1]
        assert row["same_tokens"] == 1  # both do the same work


def test_weight_accuracy(tmp_path, capsys):
    options = ["--fp32", str(model("cpu-fp32")), "--tokens", "70", "--window", "32"]
    record = run("weight_accuracy", tmp_path, capsys, *options)
    rows = record["rows"]
    runtime, exported, exact, fast = (
        "ONNX Runtime",
        "ONNX Runtime as exported",
        "jaxengine exact",
        "jaxengine fast",
    )
    assert [row["held"] for row in rows] == [
        runtime,
        exact,
        f"{runtime}, accuracy level 1",
        exported,
        exact,
        fast,
    ]
    for row in rows:
        check_figures(row, ("perplexity", "positions"))
        assert row["positions"] == 70
    float_reference, float_exact, int4_reference, *others = rows
    assert float_reference["mean_error"] is int4_reference["mean_error"] is None
    for row in (float_exact, *others):
        check_figures(row, ("mean_error", "max_error", "flips"))
        assert 0 <= row["mean_error"] <= row["max_error"]
    assert (
        max(float_exact["max_error"], others[1]["max_error"])
        < 1e-3
        < min(others[0]["mean_error"], others[2]["mean_error"])
    )


def test_weight_accuracy_names_a_file_that_onnx_runtime_cannot_load(tmp_path, capsys):
    folder = shutil.copytree(model("cpu-int4"), tmp_path / "broken")
    (folder / "model.onnx.data").write_bytes(b"short")
    assert weight_accuracy.main(["--int4", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"error: ONNX Runtime can't load {folder / 'model.onnx'}: ")


@pytest.mark.slow
def test_pool_scatter(tmp_path, capsys):
    sizes = {"layers": 2, "kv-heads": 1, "head-dim": 16, "decode-rows": 3, "prefill-tokens": 40, "turns": 2}
    record = run(
        "pool_scatter",
        tmp_path,
        capsys,
        *(text for name, n in sizes.items() for text in (f"--{name}", str(n))),
    )
    pool_bytes = record["settings"]["pool_bytes"]
    assert pool_bytes == 2**20
    steps = [(row["step"], row["tokens"], row["form"]) for row in record["rows"]]
    assert steps == [
        (*step, form) for step in (("decode", 3), ("prefill", 40)) for form in ("in place", "copying")
    ]
    for row in record["rows"]:
        check_figures(row, ("seconds", "time_ratio", "memory_ratio", "extra_pools", "temporary_bytes"))
        assert len(row["turns"]) == 2
        # The block table is aliased beside the pool.
        assert (row["aliased_bytes"] >= pool_bytes) == (row["form"] == "in place")
        if row["form"] == "copying":
            assert row["time_ratio"] == row["memory_ratio"] == 1


def test_host_time(tmp_path, capsys):
    sizes = ["--residents", "2", "16", "--contexts", "20", "40", "--waiting", "1", "9", "--context", "20"]
    options = [*sizes, "--at", "3", "--steps", "4", "--model", str(model("cpu-fp32"))]
    record = run("host_time", tmp_path, capsys, *options)
    cases = [(row["varied"], row["residents"], row["context"], row["waiting"]) for row in record["rows"]]
    assert cases == [
        ("residents", 2, 20, 0),
        ("residents", 16, 20, 0),
        ("context", 3, 20, 0),
        ("context", 3, 40, 0),
        ("waiting", 3, 20, 1),
        ("waiting", 3, 20, 9),
    ]
    for row in record["rows"]:
        check_figures(row["seconds"], ("plan", "execute", "commit", "drain", "step"))
        assert row["seconds"]["step"] >= max(row["seconds"][part] for part in ("plan", "execute", "commit"))
    check_figures(record["growth"], ("residents", "context", "waiting"))
    check_figures(record, ("share_of_model_step",))


@pytest.mark.slow
def test_sampling_cost(tmp_path, capsys):
    sizes = ["--vocabularies", "300", "--rows", "1", "6", "--turns", "2"]
    record = run("sampling_cost", tmp_path, capsys, *sizes)
    assert record["settings"]["turns"] == 2
    kinds = [(kind, 300, rows) for rows in (1, 6) for kind in sampling_cost.KINDS]
    assert [(row["kind"], row["vocabulary"], row["rows"]) for row in record["rows"]] == kinds
    for row in record["rows"]:
        check_figures(row, ("seconds", "step_seconds", "of_step", "sorting_seconds", "ratio"))
        assert len(row["turns"]) == 2


@pytest.fixture(scope="module")
def folder_with_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_tiny_gguf(folder / "tiny.gguf"), folder, silent)
    return str(folder)


@pytest.mark.slow
def test_guidance_cost(tmp_path, capsys, folder_with_tokenizer):
    sizes = ["--folder", folder_with_tokenizer, "--batch", "2", "--new-tokens", "8", "--turns", "2"]
    record = run("guidance_cost", tmp_path, capsys, *sizes)
    assert [(row["grammar"], row["batch"]) for row in record["rows"]] == [
        ("text", 2),
        ("records", 2),
    ]
    for row in record["rows"]:
        check_figures(row, ("seconds_per_token", "plain_seconds_per_token", "ratio"))
        assert row["steps"] <= row["plain_steps"] == 7
        assert [len(turns) for turns in row["turns"].values()] == [2, 2]


@pytest.mark.slow
def test_speculation(tmp_path, capsys, folder_with_tokenizer):
    sizes = ["--batch", "2", "--passage-tokens", "5", "--new-tokens", "12", "--turns", "2"]
    record = run("speculation", tmp_path, capsys, "--folder", folder_with_tokenizer, *sizes)
    assert record["settings"]["prompt_tokens"] == 15
    (row,) = record["rows"]
    check_figures(row, ("seconds", "plain_seconds", "ratio"))
    assert row["steps"] <= row["plain_steps"] == 11
    assert row["accepted"] <= row["drafted"]


@pytest.mark.slow
def test_load_memory(tmp_path, capsys):
    record = run("load_memory", tmp_path, capsys, "--weights", "both", "--turns", "1")
    assert record["settings"] == {"folder": "llama", "turns": 1}
    exact, fast, peer = record["rows"]
    names = [row["contender"] for row in record["rows"]]
    assert names == ["jaxengine exact", "jaxengine fast", "ONNX Runtime"]
    for row in record["rows"]:
        check_figures(row, ("seconds", "peak_over_held", "time_ratio"))
        assert len(row["turns"]) == 1
        assert row["peak_bytes"] >= row["kept_bytes"] > 0
        assert row["peak_over_held"] == row["peak_bytes"] / row["held_bytes"]
    assert peer["time_ratio"] == 1
    # Four bits a weight in the file, 32 and 8 in memory, beside tables that stay as they are.
    file_bytes = (model("cpu-int4") / "model.onnx.data").stat().st_size
    assert exact["held_bytes"] > fast["held_bytes"] > file_bytes


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_growth_is_the_exponent_of_a_power_law(exponent):
    sizes = [16, 64, 1024]
    assert host_time.growth(sizes, [3e-4 * n**exponent for n in sizes]) == pytest.approx(exponent, abs=1e-9)


def test_perplexity_is_that_of_the_given_probabilities():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]], np.float32))
    found = weight_accuracy.negative_log_likelihood(logits + 7, np.array([0, 1, 2]))
    np.testing.assert_allclose(found, -np.log([0.25, 0.8]), rtol=1e-6)


def test_prompts_differ_by_row_and_repeat_the_text_where_it_ends():
    first, second = decode_throughput.prompts(model("cpu-fp32"), 2, 48)
    assert len(first) == len(second) == 48
    assert first != second
    (long,) = decode_throughput.prompts(model("cpu-fp32"), 1, 20_000)
    assert long[:48] == first
    assert len(long) == 20_000


def test_C9_fairness(tmp_path, capsys):
    sizes = ["--bound", "8", "--sessions", "6", "--places", "4", "--blocks", "4", "8", "--arrivals", "0.5"]
    record = run("fairness", tmp_path, capsys, *sizes)
    expected = {"bound": 8, "loads": 1, "sessions": 6, "places": 4, "blocks": [4, 8], "arrivals": 0.5}
    assert record["settings"] == expected
    settings = [
        (name, blocks, way)
        for name in fairness.POLICIES
        for blocks in (4, 8)
        for way in ("recompute", "none")
    ]
    assert [(row["policy"], row["num_blocks"], row["preemption"]) for row in record["rows"]] == settings
    for row in record["rows"]:
        check_figures(row, ("requests", "steps", "preemptions", "replayed_share", "forced", "overtaken"))
        for kind in fairness.KINDS:
            check_figures(row[kind], ("p50", "p99", "max"))
            assert row[kind]["p50"] <= row[kind]["p99"] <= row[kind]["max"]
        assert row["forced"] == 0 or row["preemption"] == "none"
        assert row["preemptions"] == 0 or row["preemption"] == "recompute"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, ["--json", "no/x.json"], "argument --json: no/x.json can't be written") for name in MAINS),
        ("decode_throughput", ["--turns", "0"], "argument --turns: 0 is below 1"),
        ("pool_scatter", ["--turns", "many"], "argument --turns: 'many' is no integer"),
        (
            "decode_throughput",
            ["--folder", "no"],
            "argument --folder: no holds no genai_config.json; give a model folder",
        ),
        (
            "weight_accuracy",
            ["--int4", "no"],
            "argument --int4: no holds no genai_config.json; give a model folder",
        ),
    ],
)
def test_a_wrong_option_is_named(name, options, message, capsys):
    main, required = MAINS[name]
    with pytest.raises(SystemExit) as caught:
        main([*required, *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "decode_throughput",
            ["--prompt-tokens", "500", "--new-tokens", "13"],
            "don't fit the context of 512",
        ),
        (
            "weight_accuracy",
            ["--int4", str(model("paged-fp16"))],
            "Could not find an implementation for PagedAttention",
        ),
        ("pool_scatter", ["--prefill-tokens", "99999"], "blocks of the 6250 needed; raise --pool-mib"),
    ],
)
def test_what_cannot_be_measured_is_one_line(name, options, message, capsys):
    main, required = MAINS[name]
    assert main([*required, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_contender_that_cannot_load_is_named(tmp_path, capsys):
    folder = tmp_path / "broken"
    shutil.copytree(model("cpu-fp32"), folder)
    (folder / "model.onnx.data").write_bytes(b"short")
    assert decode_throughput.main(["--folder", str(folder)]) == 1
    assert capsys.readouterr().err.startswith("error: jaxengine exact failed: ")


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(report, "_version", lambda name: None)
    assert decode_throughput.main(MAINS["decode_throughput"][1]) == 1
    assert capsys.readouterr().err == "error: this benchmark needs onnxruntime-genai: install it with pip\n"


def test_a_table_lines_up():
    assert report.table(("name", "n"), [("a", "1"), ("longer", "20")]).splitlines() == [
        "| name   |  n |",
        "| ------ | -: |",
        "| a      |  1 |",
        "| longer | 20 |",
    ]
