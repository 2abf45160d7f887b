"""J5, C14, S3: a windowed model in the engine with rings, against ONNX Runtime and against a full cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

import jaxengine as je
from jaxengine.windows import ring_of
from tests.jaxengine.serving import differences, serve
from tests.onnx_import.attention_edits import cap, sink, window_first_layer
from tests.onnx_import.reference import edited, model, runtime_logits

# A window of 8 and a chunk of 5 in blocks of 3: rings of four blocks.
CONFIG = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=40, block_size=3, chunk_size=5)
PROMPTS = [np.random.default_rng(length).integers(3, 320, length) for length in (3, 7, 24)]


def all_of_them(proto: onnx.ModelProto) -> None:
    window_first_layer(proto)
    cap(proto)
    sink(proto)


def rings(loaded: je.Model, config: je.EngineConfig) -> list[int | None]:
    return [ring_of(pages) for pages in je.init_state(loaded, config).store.pages]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tolerance"), [("cpu-fp32", 1e-4), ("paged-fp16", 0.03)])
def test_J5_S3_case_C14_logits_are_the_runtimes_past_window_and_chunk(
    tmp_path: Path, form: str, tolerance: float
) -> None:
    """Prompts longer than window, chunk and ring, in one batch with a short one, then decoded further."""
    loaded = je.load_model(edited(model(form), tmp_path / form, all_of_them))
    reference = edited(model("cpu-fp32"), tmp_path / "reference", all_of_them)
    assert rings(loaded, CONFIG) == [4, None]
    served = serve(loaded, CONFIG, PROMPTS, most=12)
    assert served.widest > 1
    for i, prompt in enumerate(PROMPTS):
        sequence = np.concatenate([prompt, served.tokens[i]]).astype(np.int32)
        expected = runtime_logits(reference, sequence)
        mine = {length: row for (nth, length), row in served.logits.items() if nth == i}
        assert len(mine) >= 8
        for length, row in mine.items():
            assert np.abs(row - expected[length - 1]).max() < tolerance * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cpu-fp32", "cpu-int4"])
def test_J1_J3_J5_E6_rings_give_the_bits_of_a_full_cache(tmp_path: Path, form: str) -> None:
    """Served together with rings, in chunks of 5, and without a chunk size, so with full caches, in one chunk each."""
    loaded = je.load_model(edited(model(form), tmp_path / form, all_of_them))
    full = dataclasses.replace(CONFIG, chunk_size=None, max_scheduled_tokens=40)
    assert (rings(loaded, CONFIG), rings(loaded, full)) == ([4, None], [None, None])
    ringed, whole = (serve(loaded, config, PROMPTS, most=12) for config in (CONFIG, full))
    assert not differences(ringed, whole)
    assert ringed.tokens == whole.tokens
    assert ringed.steps > whole.steps
