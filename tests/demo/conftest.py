"""The tiny llama, written once a session: as a GGUF file and as the folder converted from it."""

from pathlib import Path

import pytest

from jaxengine.demo.convert import convert
from jaxengine.demo.progress import silent
from tests.demo.synthetic import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    convert(tiny_gguf, folder, silent)
    return folder
