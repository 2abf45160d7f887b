"""E6, S3: where a graph holds long and short rotary tables, each request's session limit alone chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import jaxengine as je
from tests.jaxengine.serving import differences, serve
from tests.onnx_import.reference import edited, model, runtime_logits
from tests.onnx_import.tables_by_length import THRESHOLD, choose

CROWDED = je.EngineConfig(max_batch_size=4, max_scheduled_tokens=16, num_blocks=40, block_size=7)
ALONE = dataclasses.replace(CROWDED, max_scheduled_tokens=64)


@pytest.mark.slow
def test_E6_S3_the_session_limit_chooses_the_tables_from_the_first_token_on(tmp_path: Path) -> None:
    """Requests of both kinds together, in chunks: the bits of each alone, and the runtime's logits for its kind.

    The long ones cross the threshold while decoding; what they stored before was long rotated too.
    """
    folder = edited(model("cpu-fp32"), tmp_path / "copy", choose)
    loaded = je.load_model(folder)
    prompts = [np.random.default_rng(6).integers(3, 320, 24)] * 3
    sessions = [THRESHOLD, THRESHOLD + 1, 40]
    together = serve(loaded, CROWDED, prompts, most=30, sessions=sessions, arrivals=[0, 2, 1])
    assert together.widest > 1
    for i, (prompt, limit) in enumerate(zip(prompts, sessions, strict=True)):
        alone = serve(loaded, ALONE, [prompt], most=30, sessions=[limit])
        mine = {(0, length): row for (nth, length), row in together.logits.items() if nth == i}
        found = differences(dataclasses.replace(together, logits=mine), alone)
        assert not found, "; ".join(found)
        # The runtime chooses by the length of the batch: fill it up to the limit.
        sequence = np.concatenate([prompt, together.tokens[i], np.full(limit, 3)])[:limit].astype(np.int32)
        expected = runtime_logits(folder, sequence)
        assert len(mine) == min(30, limit - 24)
        for length, row in ((length, row) for (_, length), row in mine.items()):
            np.testing.assert_allclose(row, expected[length - 1], atol=1e-4 * np.abs(expected).max())
    assert (together.logits[0, 24] != together.logits[1, 24]).any()
    np.testing.assert_array_equal(together.logits[1, 24], together.logits[2, 24])
