"""The benchmarks of a card at tiny sizes on a CPU: what they count, who agrees with whom, who is named as left out."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import attention_kernels, gpu_decode, plots, report
from benchmarks.attention_cases import MODELS, Case, Heads, make_inputs
from benchmarks.attention_contenders import CONTENDERS, jax_paged, repeated
from benchmarks.random_decoder import SHAPES, Shape
from tests.benchmarks.test_scripts import check_figures, run

PLAIN = Heads("plain", 4, 2, 16)
WINDOWED = Heads("windowed", 4, 2, 16, window=11, sinks=True)
SHAPE = Shape("tiny", 2, 32, 2, 1, 16, 48, 60, 1e4, head_norm=True)
RATES = ["--turns", "2", "--copy-mib", "1"]
SMALL = [*RATES, "--matrix-size", "64", "--calls", "2", "--block-size", "8", "--dtype", "float32"]


def seen(case):
    """Pairs of query and key, and keys that any query sees, of one row, one by one."""
    window = case.heads.window or case.context
    pairs = [(q, k) for q in range(case.past, case.context) for k in range(max(q - window + 1, 0), q + 1)]
    return len(pairs), len({k for _, k in pairs})


@pytest.mark.parametrize("heads", [PLAIN, WINDOWED], ids=str)
@pytest.mark.parametrize(("new", "past"), [(1, 4), (1, 30), (9, 0), (20, 0), (7, 6), (7, 30)])
def test_a_case_counts_what_its_queries_see(heads, new, past):
    case = Case(heads, 3, new, past)
    pairs, keys = seen(case)
    assert case.flops == 3 * pairs * 4 * 16 * 2 * 2  # heads, head_dim; two products of two operations
    assert case.live_bytes == 3 * keys * 2 * 2 * 16 * 2  # both kinds, KV heads, head_dim, bytes


def test_pools_share_no_block_and_stage_the_last_tokens():
    case = Case(PLAIN, 2, 3, 10, block_size=8, dtype="float32")
    inputs = jax.tree.map(np.asarray, make_inputs(case, 3))
    assert sorted(inputs.tables.ravel()) == list(range(3 * 2 * 2))
    for pool in range(3):
        for row in range(2):
            for i, position in enumerate(range(10, 13)):
                block = inputs.tables[pool, row, position // 8]
                np.testing.assert_array_equal(
                    inputs.staged[pool, 3 * row + i], inputs.pages[block, :, :, position % 8]
                )


@pytest.mark.slow
def test_attention_kernels(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MODELS, "windowed", WINDOWED)
    sizes = ["--models", "windowed", "--batch", "2", "--contexts", "30", "--prefill", "20:0", "9:21"]
    record = run("attention_kernels", tmp_path, capsys, *SMALL, *sizes, "--cache-mib", "0")
    steps = ["prefill 1 x 20 behind 0", "decode 2 x 30", "prefill 1 x 9 behind 21"]
    cases = [(row["step"], row["contender"]) for row in record["rows"]]
    assert sorted(cases) == sorted((step, name) for step in steps for name in CONTENDERS)
    for row in record["rows"]:
        if row["contender"] in ("xla", "dot_xla_gathering", "dot_xla_gathered"):
            check_figures(row, ("seconds", "of_copies", "of_products", "ratio", "difference"))
            assert row["difference"] < 1e-4
            assert len(row["turns"]) == row["calls"] == 2
        else:
            assert row["reason"]
            assert "seconds" not in row
    assert record["device"]["platform"] == "cpu"
    assert record["goals"] == []


def test_attention_kernels_names_what_is_left_out(tmp_path, capsys):
    """A case that has no room; after that no time is left."""
    file = tmp_path / "result.json"
    options = ["--models", "llama-3-8b", "--batch", "1000", "--contexts", "8192", "--prefill"]
    assert attention_kernels.main([*SMALL, *options, "--most-gib", "1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["contender"] == "all"
    assert "raise --most-gib" in row["reason"]
    assert "NOT a GPU" in capsys.readouterr().out


def test_a_contender_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel\nand much more")

    broken = dataclasses.replace(CONTENDERS["dot_xla_gathering"], attend=fail)
    monkeypatch.setitem(CONTENDERS, "dot_xla_gathering", broken)
    reasons: dict[str, str] = {}
    case = Case(PLAIN, 2, 1, 8, block_size=8, dtype="float32")
    chosen = {name: CONTENDERS[name] for name in ("xla", "dot_xla_gathering")}
    assert list(attention_kernels.compiled(case, chosen, 1, 1, reasons)) == ["xla"]
    assert reasons == {"dot_xla_gathering": "RuntimeError: no such kernel"}


@pytest.mark.slow
def test_contenders_agree_when_they_walk_over_pools():
    """JAX's kernel too, interpreted, so that a GPU times the same attention: scale, order of pages, lengths."""
    case = Case(PLAIN, 2, 1, 29, block_size=8, dtype="float32")
    inputs = make_inputs(case, 2)

    def result(contender, calls):
        assert contender.refusal(case, 2) is None
        shared, own = contender.operands(case, inputs)
        return np.asarray(jax.jit(repeated(contender, case, 2, calls))(inputs.query, shared, own))

    ours = result(CONTENDERS["xla"], 2)
    for other in (jax_paged(interpret=True), CONTENDERS["dot_xla_gathering"], CONTENDERS["dot_xla_gathered"]):
        np.testing.assert_allclose(result(other, 2), ours, atol=1e-5)
    assert np.abs(result(CONTENDERS["xla"], 4) - ours).max() > 1e-4  # every call counts


def test_keys_in_order_are_not_copied_into_many_pools():
    assert "9 pools" in CONTENDERS["dot_xla_gathered"].refusal(Case(PLAIN, 1, 1, 8), 9)


@pytest.mark.slow
def test_gpu_decode(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    sizes = ["--models", "tiny", "--batch", "3", "1", "--contexts", "20", "50000000", "--steps", "2"]
    record = run("gpu_decode", tmp_path, capsys, *RATES, *sizes, "--block-size", "8", "--pool-gib", "1")
    rows = record["rows"]
    assert [(row["batch"], row["context"]) for row in rows] == [
        (b, c) for c in (20, 50_000_000) for b in (3, 1)
    ]
    weights = 2 * (2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16) + 32 + 32 * 60)
    for row in rows:
        assert row["weight_bytes"] == weights
        assert row["live_bytes"] == row["batch"] * row["context"] * 2 * 2 * 16 * 2
        moved = row["weight_bytes"] + row["live_bytes"]
        assert row["bound_seconds"] == pytest.approx(moved / record["device"]["copy_rate"])
    for row in rows[:2]:
        check_figures(row, ("seconds", "over_bound", "tokens_per_second", "ratio"))
        assert row["backend"] == "xla"
        assert set(row["parts"]) == {"forward", "choose", "publish"}
    for row in rows[2:]:
        assert "raise --pool-gib" in row["reason"]


def test_gpu_decode_without_a_hopper_card_refuses_the_kernel(capsys):
    assert gpu_decode.main(["--backends", "mosaic_gpu"]) == 1
    assert capsys.readouterr().err == (
        "error: the mosaic_gpu backend needs a Hopper GPU; give --backends xla\n"
    )


RESULTS = {
    "attention_kernels": [
        {
            "model": "m",
            "new": 1,
            "batch": 2,
            "context": 9,
            "contender": "xla",
            "seconds": 1,
            "of_copies": 0.5,
        },
        {"model": "m", "new": 4, "past": 0, "contender": "xla", "seconds": 1, "of_products": 0.5},
        {"model": "m", "contender": "all", "reason": "no room"},
    ],
    "gpu_decode": [
        {"model": "m", "batch": 2, "context": 9, "backend": "xla", "seconds": 1, "over_bound": 1.5},
        {"model": "m", "batch": 4, "context": 9, "backend": "xla", "reason": "no room"},
    ],
}


def result_file(folder, name, rows):
    file = folder / "result.json"
    file.write_text(json.dumps({"benchmark": name, "device": {"kind": "a card"}, "rows": rows}))
    return str(file)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="drawing needs matplotlib")
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_drawn_from_json_alone(name, tmp_path):
    picture = tmp_path / "picture.svg"
    assert plots.main([result_file(tmp_path, name, RESULTS[name]), str(picture)]) == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [("fairness", [], "not of fairness"), ("gpu_decode", RESULTS["gpu_decode"][1:], "no measured row")],
)
def test_what_cannot_be_drawn_is_one_line(name, rows, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "_version", lambda name: "3.9")
    assert plots.main([result_file(tmp_path, name, rows), str(tmp_path / "x.png")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("main", [attention_kernels.main, gpu_decode.main])
def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(main, capsys, monkeypatch):
    monkeypatch.setattr(report, "_version", lambda name: None)
    assert main(["--plot", "x.png"]) == 1
    assert capsys.readouterr().err == "error: this benchmark needs matplotlib: install it with pip\n"


def test_a_decode_step_that_fails_is_named(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room\nand much more")

    monkeypatch.setitem(SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(gpu_decode, "compile_programs", fail)
    file = tmp_path / "result.json"
    sizes = ["--models", "tiny", "--batch", "2", "--contexts", "20", "--block-size", "8", "--pool-gib", "1"]
    assert gpu_decode.main([*RATES, *sizes, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["reason"] == "MemoryError: no room"
    assert "seconds" not in row


def test_what_no_time_is_left_for_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_decode, "time", SimpleNamespace(monotonic=iter([0.0, 11.0]).__next__))
    file = tmp_path / "result.json"
    sizes = ["--models", "llama-3-8b", "--batch", "2", "--contexts", "20", "--seconds", "10"]
    assert gpu_decode.main([*RATES, *sizes, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["reason"] == "not begun: 10 seconds were over; raise --seconds"
    assert row["reason"] in capsys.readouterr().out
