"""A model folder's `genai_config.json`, read once into frozen values; every refusal names file and key.

The format is the one written by the ONNX Runtime GenAI model builder. Nothing here looks at the graph or
decides anything from the model's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnx_import.errors import FolderError
from onnx_import.manifest import DecoderConfig, read_decoder
from onnx_import.sections import Section, read_json

CONFIG_NAME = "genai_config.json"
GENERATION_NAME = "generation_config.json"

_MODEL_KEYS = frozenset(
    "bos_token_id context_length decoder eos_token_id pad_token_id sep_token_id type vocab_size".split()
)
_TOP_KEYS = frozenset(("model", "search", "engine"))


@dataclass(frozen=True)
class FolderConfig:
    """What the folder says about the model's vocabulary, limits and default search.

    `max_length` is `search.max_length`, or the context length where that is absent, and never above it.
    `search` is the raw section. `notes` says what was tolerated, one sentence an entry. `static_batching` is true
    where the `engine` section asks for a static batch and not for a dynamic one.
    """

    model_type: str
    vocab_size: int
    context_length: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    search: Mapping[str, Any]
    notes: tuple[str, ...]
    static_batching: bool = False


def read_config(
    folder: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[FolderConfig, DecoderConfig]:
    """Read the folder's configuration with the caller's overrides merged in; either all of them count, or it raises.

    Raises FolderError, naming file and key, for a missing folder or file, broken JSON, a missing key, a
    wrong type, or a token id outside the vocabulary; also for overrides that aren't JSON.
    """
    if not _exists(folder):
        raise FolderError(f"The model folder {folder} doesn't exist.")
    if not folder.is_dir():
        raise FolderError(f"The model folder {folder} is a file; give the folder that holds {CONFIG_NAME}.")
    top = read_json(folder / CONFIG_NAME, overrides)
    top.note_unknown(_TOP_KEYS)
    model = top.section("model")
    model.note_unknown(_MODEL_KEYS)
    decoder = read_decoder(model.section("decoder"))
    vocab_size = model.integer("vocab_size")
    context_length = model.integer("context_length")
    search = _search(top)
    max_length = context_length
    if search.values.get("max_length") is not None:
        max_length = min(search.integer("max_length"), context_length)
    config = FolderConfig(
        model_type=model.text("type"),
        vocab_size=vocab_size,
        context_length=context_length,
        max_length=max_length,
        eos_token_ids=_eos_token_ids(folder, model, vocab_size),
        bos_token_id=_lenient_id(model, "bos_token_id", vocab_size),
        pad_token_id=_lenient_id(model, "pad_token_id", vocab_size),
        search=MappingProxyType(dict(search.values)),
        notes=tuple(sorted(set(top.notes))),
        static_batching=_static_batching(top),
    )
    return config, decoder


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _search(top: Section) -> Section:
    if top.values.get("search") is None:
        top.note("search", "is missing; defaults are used")
        return top.child("search", {})
    return top.section("search")


def _static_batching(top: Section) -> bool:
    if top.values.get("engine") is None:
        return False
    engine = top.section("engine").values
    return engine.get("static_batching") is not None and engine.get("dynamic_batching") is None


def _eos_token_ids(folder: Path, model: Section, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids from the model section, else from the generation configuration beside it."""
    source, ids = model, model.token_ids("eos_token_id")
    if not ids and (folder / GENERATION_NAME).exists():
        source = read_json(folder / GENERATION_NAME)
        ids = source.token_ids("eos_token_id")
        if ids:
            model.notes.append(f"{GENERATION_NAME}: key 'eos_token_id' is used; {CONFIG_NAME} has none.")
    if not ids:
        model.note("eos_token_id", "is missing; only limits end a turn")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise source.fail("eos_token_id", f"holds {token}, outside the vocabulary of {vocab_size}")
    return ids


def _lenient_id(model: Section, name: str, vocab_size: int) -> int | None:
    """The first id listed, or None; these ids change no mathematics, so an odd one is only noted."""
    ids = model.token_ids(name)
    if len(ids) > 1:
        model.note(name, f"is a list; {ids[0]} is used")
    if ids and not 0 <= ids[0] < vocab_size:
        model.note(name, f"is {ids[0]}, no token; it is ignored")
        return None
    return ids[0] if ids else None
