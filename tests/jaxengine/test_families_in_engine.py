"""S3, E5, E6, E2: every kind of decoder in the engine, beside ONNX Runtime and however it is run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxengine as je
from tests.jaxengine.serving import differences, serve
from tests.model_checks import ALONE, Checks, compare
from tests.onnx_import.reference import MODELS
from tests.reference_folders import reference_folder, tolerance

KINDS = ("gemma2", "gptoss", "lfm2", "lfm2moe", "phi3-longrope", "qwen3_5")
FOLDERS = [
    *((form, family) for family in KINDS for form in ("cpu-fp32", "paged-fp16")),
    ("cpu-int4", "gemma2"),
    ("cpu-int4", "lfm2moe"),
    ("cpu-int4", "qwen3_5"),
]
MADE_OF_OTHERS = {("cpu-fp32", "lfm2"), ("cpu-int4", "qwen3_5")}
"""lfm2moe has lfm2's convolutions, and gemma2 its products of floats; quantised products are those of the others."""


@functools.cache
def checks_of(form: str, family: str) -> Checks:
    """The runs of a folder, which all tests share: compiling is most of the time."""
    return Checks(MODELS / form / family)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id="/".join(each), marks=[pytest.mark.thorough] * (each in MADE_OF_OTHERS))
        for each in FOLDERS
    ],
)
def folder(request: Any) -> tuple[str, str, Checks]:
    """Form, family and their runs."""
    form, family = request.param
    return form, family, checks_of(form, family)


@pytest.mark.slow
def test_S3_J5_greedy_tokens_and_their_logits_are_the_runtimes(
    folder: tuple[str, str, Checks], tmp_path: Path
) -> None:
    """123 of them, past windows, chunks and a long table's threshold; packed exports within their number format."""
    form, family, checks = folder
    expected = checks.reference_logits(reference_folder(MODELS, form, family, tmp_path))
    # A tenth of what is specified for float32; 1.4e-5 is seen in recurrences, else some 3e-6.
    allowed = tolerance(checks, MODELS, form, family, tmp_path) / (10 if form.startswith("cpu") else 1)
    found = compare(checks.logits, expected)
    assert found.differences.max() <= allowed
    assert found.wrong(allowed) == []
    assert len(found.differences) == 123


@pytest.mark.slow
def test_E6_logits_keep_their_bits_however_a_prompt_is_cut(folder: tuple[str, str, Checks]) -> None:
    """In chunks of seven beside whole; a short prompt is one chunk of each."""
    assert folder[2].chunk_differences() == []


@pytest.mark.slow
def test_E5_E6_case_C3_logits_keep_their_bits_in_any_company(folder: tuple[str, str, Checks]) -> None:
    """Four prompts in one batch, decodes beside prefills, beside each alone; states, windows, experts and tables."""
    checks = folder[2]
    assert checks.company_differences() == []
    assert checks.packed.widest == 4


@pytest.mark.slow
def test_E2_F1_steps_that_fail_change_no_token(folder: tuple[str, str, Checks]) -> None:
    """Seven faults at seven stages of `Engine`, which takes each step again."""
    assert folder[2].fault_differences() == []


def test_E6_case_C3_packed_convolutions_see_their_own_sequence_only() -> None:
    """The packed LFM2 export, whose convolution knows no borders: A of 5 tokens and B of 3, in every order."""
    model = je.load_model(MODELS / "paged-fp16" / "lfm2")
    prompts = [np.arange(10, 15), np.arange(30, 33), np.arange(50, 54)]
    alone = [serve(model, ALONE, [prompt], most=3) for prompt in prompts]
    for order in itertools.permutations(range(3)):
        together = serve(model, ALONE, [prompts[nth] for nth in order], most=3)
        assert together.widest == 3
        for place, nth in enumerate(order):
            mine = {(0, length): row for (i, length), row in together.logits.items() if i == place}
            assert differences(dataclasses.replace(together, logits=mine), alone[nth]) == []
            assert together.tokens[place] == alone[nth].tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gptoss"])
def test_S1_case_C14_both_forms_choose_the_same_tokens(family: str) -> None:
    """Prompts longer than window and chunk: the two-dimensional form's windowed caches, and the packed one's tables."""
    forms = [checks_of(form, family) for form in ("cpu-fp32", "paged-fp16")]
    assert len(set(map(tuple_of_tokens, forms))) == 1


def tuple_of_tokens(checks: Checks) -> tuple[tuple[int, ...], ...]:
    """All tokens that were chosen, by prompt."""
    return tuple(tuple(served.tokens[0]) for served in checks.alone)
