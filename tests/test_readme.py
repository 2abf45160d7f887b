"""What the README says is what happens: its Python runs, and CI runs its test command."""

import re
from pathlib import Path

import pytest

from jaxengine.demo.convert import convert
from jaxengine.demo.progress import silent
from tests.demo.synthetic import write_tiny_gguf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_command_that_the_readme_gives():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert f"\n{command}\n" in README


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "folder").mkdir()
    convert(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "folder", silent)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(blocks) == 2
    printed = capsys.readouterr().out.split()
    assert 0 < len(printed) <= 16
    assert all(token.isdecimal() for token in printed)
    assert names["state"] is not None


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: str):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
