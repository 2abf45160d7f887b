"""A tiny random chat model as a folder, with a context long enough to be interrupted in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxengine.demo.convert import convert
from jaxengine.demo.progress import silent
from tests.demo import synthetic

CONTEXT = 1024


def write_tiny_folder(path: Path, context: int = CONTEXT) -> Path:
    """Writes the folder; the model has ChatML's template and control tokens and a byte-level vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "CONTEXT", context)
        source = synthetic.write_tiny_gguf(path / "tiny.gguf")
    convert(source, path, silent)
    source.unlink()
    return path


def variant(
    source: Path, path: Path, search: dict[str, Any] | None = None, drop: tuple[str, ...] = ()
) -> Path:
    """A copy of a folder with `search` entries changed and files left out."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns(*drop))
    config = json.loads((path / "genai_config.json").read_text())
    config["search"] |= search or {}
    (path / "genai_config.json").write_text(json.dumps(config))
    return path
