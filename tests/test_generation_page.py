"""The examples of docs/generation.md run, one after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "generation.md"


@pytest.mark.slow
def test_K1_K5_L1_M1_the_examples_of_the_page_run():
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert len(examples) == 9
