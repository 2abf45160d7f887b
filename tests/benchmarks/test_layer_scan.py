"""`layer_scan` at a tiny size: its forms compute the same bits, and its graphs are what ONNX Runtime reads in them."""

import contextlib
import json

import jax
import numpy as np
import pytest

from benchmarks import layer_scan
from benchmarks.repeated_layers import write_folder
from onnx_import import import_decoder, read_folder
from tests.onnx_import.reference import logits, runtime_logits


def test_a_repeated_graph_is_a_model_of_that_depth_and_width(tmp_path):
    folder = write_folder(tmp_path, 3, widen=2)
    decoder = import_decoder(read_folder(folder))
    assert [(spec.layer, spec.num_heads, spec.num_kv_heads) for spec in decoder.layers] == [
        (layer, 12, 4) for layer in range(3)
    ]
    tokens = np.random.default_rng(0).integers(decoder.vocab_size, size=9)
    np.testing.assert_allclose(logits(decoder, tokens), runtime_logits(folder, tokens), atol=3e-5)


def test_every_repeated_layer_has_weights_of_its_own(tmp_path):
    decoder = import_decoder(read_folder(write_folder(tmp_path, 4)))
    rolled = layer_scan.roll(decoder.plan)
    assert len(rolled.keys) == 7  # five products and two norms; the rotary tables are everyone's
    for keys in rolled.keys.values():
        assert len(keys) == 3
        leaves = [np.asarray(jax.tree.leaves(decoder.params[key])[0]) for key in keys]
        assert len({leaf.tobytes() for leaf in leaves}) == 3


@pytest.fixture
def in_this_process(monkeypatch):
    """Has each contender work once, in this process."""

    @contextlib.contextmanager
    def started(contenders):
        yield {contender.name: contender.make(*contender.arguments) for contender in contenders}

    def take_turns(works, task, turns):
        return {name: [work(task)] * turns for name, work in works.items()}

    for name, instead in (("started", started), ("take_turns", take_turns)):
        monkeypatch.setattr(layer_scan, name, instead)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_every_form_gives_the_same_bits(tmp_path, capsys):
    file = tmp_path / "result.json"
    options = ["--layers", "3", "--widen", "1", "--turns", "2", "--runs", "1"]
    assert layer_scan.main([*options, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["benchmark"] == "layer_scan"
    assert record["machine"]["cores"] >= 1
    assert record["settings"] == {"rows": 8, "context": 240, "widen": 1, "turns": 2, "runs": 1}
    rows = record["rows"]
    assert capsys.readouterr().out.count("\n| ") == len(rows) + 2
    assert [(row["layers"], row["step"], row["form"]) for row in rows] == [
        (3, step, form) for step in ("decode", "mixed") for form in layer_scan.FORMS
    ]
    for row in rows:
        assert row["same_bits"]
        assert row["largest_difference"] == 0
        assert (row["pages_made"] > 0) == (row["form"] == layer_scan.OVER_PAGES)
        for figure in ("trace_seconds", "compile_seconds", "step_seconds", "temporary_bytes"):
            assert row[figure] > 0
        assert len(row["turns"]) == 2


def test_a_batch_has_rows_of_their_own_tokens():
    mixed = layer_scan.step_batch(layer_scan.STEPS["mixed"], 320)
    positions = [240] * 7 + list(range(249))
    np.testing.assert_array_equal(mixed.positions, positions)
    np.testing.assert_array_equal(mixed.logits_rows, [0, 1, 2, 3, 4, 5, 6, 255])
    decode = layer_scan.step_batch(layer_scan.STEPS["decode"], 320)
    np.testing.assert_array_equal(decode.positions, [240] * 8)
    np.testing.assert_array_equal(decode.logits_rows, np.arange(8))


def test_ratios_are_medians_of_what_stands_side_by_side():
    def turn(trace, compiling, step, logit):
        seconds = {"trace_seconds": trace, "compile_seconds": compiling, "step_seconds": step}
        cpu = {"build_cpu_seconds": 2 * compiling, "step_cpu_seconds": 2 * step}
        return (
            seconds | cpu | {"temporary_bytes": 7, "pages_made": 0, "logits": np.array([logit], np.float32)}
        )

    unrolled = [turn(1, 3, 1, 5), turn(2, 6, 4, 5), turn(1, 1, 2, 5)]
    scanned = [turn(1, 1, 2, 5), turn(1, 1, 4, 5), turn(1, 1, 8, 5.5)]
    found = dict(zip(layer_scan.FORMS, (unrolled, scanned, unrolled), strict=True))
    base, row, same = layer_scan.compared(4, "decode", found)
    assert (base["build_ratio"], base["step_ratio"], base["trace_seconds"]) == (1, 1, 1)
    assert (row["build_ratio"], row["step_ratio"]) == (0.5, 2)
    assert row["build_cpu_ratio"] == pytest.approx(1 / 3)
    assert (row["compile_seconds"], row["step_seconds"]) == (1, 4)
    assert not row["same_bits"]
    assert row["largest_difference"] == 0.5
    assert same["same_bits"]


def test_only_what_makes_an_array_of_pages_is_counted():
    size = f"{layer_scan.NUM_BLOCKS},2,2,16,16"
    kept = [
        f"  %a = f32[{size}]{{4,3,2,1,0}} parameter(0)",
        f"  %b = f32[3,{size}]{{5,4,3,2,1,0}} bitcast(%a)",
    ]
    made = [f"  %c = f32[1,{size}]{{5,4,3,2,1,0}} dynamic-slice(%b, %i)", f"  %d = f32[{size}] copy(%c)"]
    other = ["  %e = f32[258,2,2,16,16] copy(%c)", "  %f = f32[8] fusion(%c), kind=kLoop, calls=%fused"]
    fused = "\n".join(["%fused (p: f32[1]) -> f32[8] {", *made, "}"])
    body = "\n".join(["%body (p: f32[1]) -> f32[8] {", *kept, *made, *other, "}"])
    assert layer_scan.pages_made(f"HloModule x\n\n{fused}\n\n{body}\n") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "1"], "argument --layers: 1 is below 2"),
        (["--json", "no/x.json"], "argument --json: no/x.json can't be written"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        layer_scan.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
