"""J5, C14, S3: a windowed model in the engine, whose windowed layers keep a full cache, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import jaxengine as je
from tests.jaxengine.serving import serve
from tests.onnx_import.attention_edits import cap, sink, window_first_layer
from tests.onnx_import.reference import edited, model, runtime_logits


def all_of_them(proto: onnx.ModelProto) -> None:
    window_first_layer(proto)
    cap(proto)
    sink(proto)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tolerance"), [("cpu-fp32", 1e-4), ("paged-fp16", 0.03)])
def test_J5_S3_case_C14_logits_are_the_runtimes_past_window_and_chunk(
    tmp_path: Path, form: str, tolerance: float
) -> None:
    """Prompts longer than window (8) plus chunk (5), in one batch with a short one, then decoded further."""
    loaded = je.load_model(edited(model(form), tmp_path / form, all_of_them))
    reference = edited(model("cpu-fp32"), tmp_path / "reference", all_of_them)
    config = je.EngineConfig(
        max_batch_size=4, max_scheduled_tokens=16, num_blocks=40, block_size=3, chunk_size=5
    )
    prompts = [np.random.default_rng(length).integers(3, 320, length) for length in (3, 7, 24)]
    served = serve(loaded, config, prompts, most=12)
    assert served.widest > 1
    for i, prompt in enumerate(prompts):
        sequence = np.concatenate([prompt, served.tokens[i]]).astype(np.int32)
        expected = runtime_logits(reference, sequence)
        mine = {length: row for (nth, length), row in served.logits.items() if nth == i}
        assert len(mine) >= 8
        for length, row in mine.items():
            assert np.abs(row - expected[length - 1]).max() < tolerance * np.abs(expected).max()
