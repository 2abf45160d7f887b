"""Which behaviours the tests name, and the third column of docs/spec-coverage.md, which tells it.

A behaviour is a letter and a number (`E6`), a case from the field is `case C7`. A test names one in its function's
name (`test_E6_...`, `test_case_C7_...`) or in the docstring of the function, its class or its file. Run
`python -m tests.spec_coverage` after adding tests: it writes the column anew.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "spec-coverage.md"

_ID = r"[A-T]\d{1,2}"
_CASES = re.compile(r"cases?[ _](C\d+(?:(?:, | and |_)C\d+)*)(?![^\W_])", re.IGNORECASE)
_ROW = re.compile(rf"^\| ({_ID}|case C\d+) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)


def named_in_text(text: str) -> set[str]:
    """Ids in a test's name or docstring; those that follow the word `case` or `cases` get it in front."""
    cases = {f"case {number}" for run in _CASES.findall(text) for number in re.findall(_ID, run)}
    return cases | set(re.findall(rf"(?<![^\W_]){_ID}(?![^\W_])", _CASES.sub("", text)))


def named_in_file(path: Path) -> set[str]:
    """Ids that the tests of one file name."""
    tree = ast.parse(path.read_text())
    texts = [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_test = node.name.lower().startswith("test")
            texts += [node.name, ast.get_docstring(node) or ""] if is_test else []
    return {number for text in texts for number in named_in_text(text)}


def files_by_id() -> dict[str, list[str]]:
    """Test files, relative to the tests' folder, by the id that they name."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for number in named_in_file(path):
            found[number].append(path.relative_to(TESTS).as_posix())
    return dict(found)


def claims(page: str) -> dict[str, list[str]]:
    """Test files that each row of the page claims."""
    return {number: re.findall(r"`([^`]+)`", files) for number, _, files in _ROW.findall(page)}


def rewrite(page: str, tests: dict[str, list[str]]) -> str:
    """The page with its third column from `tests`; a row without a test stays, empty, and fails the suite."""

    def row(match: re.Match[str]) -> str:
        files = ", ".join(f"`{name}`" for name in tests.get(match[1], []))
        return f"| {match[1]} | {match[2]} | {files} |"

    return _ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(), files_by_id()))
