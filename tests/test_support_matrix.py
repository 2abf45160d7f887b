"""S3: the page about what is supported says of each figure whether it is right."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model_checks import compare
from tests.support_matrix import COLUMNS, cells, report

GOOD: dict[str, Any] = {
    "agreement": {"tolerance": 1e-3, "largest": 2e-6, "beyond": 0, "tokens": 123, "ties": [], "wrong": 0},
    "chunks": [],
    "company": [],
    "faults": [],
}
TIE = {"mine": (2.0, 1.5), "theirs": (1.75, 1.875)}


def changed(**parts: Any) -> dict[str, Any]:
    result = copy.deepcopy(GOOD)
    for name, value in parts.items():
        result[name] = result[name] | value if name == "agreement" and "failed" not in value else value
    return result


@pytest.mark.parametrize(
    ("result", "right", "column", "cell"),
    [
        (GOOD, 5, "logits", "2.0e-06"),
        (changed(agreement={"largest": 2e-3, "beyond": 4}), 4, "logits", "2.0e-03 **above** at 4"),
        (changed(agreement={"ties": [TIE, TIE]}), 5, "tokens", "121 of 123, 2 near-ties"),
        (changed(agreement={"ties": [TIE, TIE], "wrong": 1}), 4, "tokens", "121 of 123, 1 near-tie, **1 wrong**"),
        (changed(agreement={"failed": "no"}), 3, "tokens", "no reference"),
        (changed(chunks=["prompt 2 after 5 tokens"]), 4, "chunks", "**differs**"),
        (changed(company={"failed": "no"}), 4, "company", "failed"),
        (changed(faults=["prompt 1 has other tokens"]), 4, "faults", "**differs**"),
        ({"refused": "UnsupportedGraph: no"}, 0, "faults", "not imported"),
    ],
)  # fmt: skip
def test_S3_a_cell_says_what_is_wrong_and_the_page_why(
    result: dict[str, Any], right: int, column: str, cell: str
) -> None:
    said, counted = cells(result)
    assert (said[column], counted) == (cell, right)
    page = report({"cpu-fp32/llama": result, "paged-fp16/llama": GOOD}, {"cpu-fp32/gpt2": "Error: unknown"})
    assert page.endswith(f"\n{5 + right} of 10 cells are right, in 2 folders.\n")
    assert ("- cpu-fp32/llama: " in page) == (result != GOOD and "**above**" not in cell)
    assert "- gpt2 as cpu-fp32: Error: unknown\n" in page


def test_S3_the_committed_page_counts_its_own_cells() -> None:
    """Whoever edits a figure by hand is found out, since its column tells what is right."""
    page = (Path(__file__).parents[1] / "docs" / "support.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| [\w-]+ \| [\dn]", line)]
    wrong = sum(
        len(re.findall(r"\*\*|failed|no reference|not imported", cell)) > 0 for row in rows for cell in row
    )
    total = len(rows) * len(COLUMNS)
    assert page.splitlines()[-1] == f"{total - wrong} of {total} cells are right, in {len(rows)} folders."


def test_S3_a_token_is_a_near_tie_only_within_twice_the_tolerance() -> None:
    """Two logits of the reference that are 0.1 apart, of a largest one of 2."""
    ours, theirs = np.array([[2.0, 1.98, 0.0]]), np.array([[1.9, 2.0, 0.0]])
    found = compare(ours, theirs)
    assert found.differences.max() == pytest.approx(0.05)
    assert found.ties[0].mine == (2.0, 1.98)
    assert found.ties[0].theirs == (1.9, 2.0)
    assert found.wrong(0.026) == []
    assert found.wrong(0.024) == [found.ties[0]]
