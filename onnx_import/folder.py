"""A model folder's `genai_config.json`, read once into frozen values; every refusal names file and key.

The format is the one written by the ONNX Runtime GenAI model builder. Nothing here looks at the graph or
decides anything from the model's name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnx_import.errors import FolderError

CONFIG_NAME = "genai_config.json"
GENERATION_NAME = "generation_config.json"

_MODEL_KEYS = frozenset(
    "bos_token_id context_length decoder eos_token_id pad_token_id sep_token_id type vocab_size".split()
)
_DECODER_KEYS = frozenset(
    "session_options filename head_size hidden_size inputs outputs num_attention_heads num_hidden_layers "
    "num_key_value_heads state_groups sliding_window run_options pipeline".split()
)
_MOST_LAYERS = 10_000
"""No decoder has as many; a larger number is a mistake that would only cost memory."""
_TOP_KEYS = frozenset(("model", "search", "engine"))
_STATE_KINDS = frozenset(("paged_kv", "fixed_conv", "fixed_recurrent"))


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


@dataclass(frozen=True)
class StateGroup:
    """One kind of per-sequence state and the layers that own it."""

    kind: str
    layer_ids: tuple[int, ...]
    derived: bool
    """True where the file has no manifest and a dense `paged_kv` over all layers was assumed."""


@dataclass(frozen=True)
class DecoderManifest:
    """How the decoder's graph is named: its file, its inputs and outputs, and its state."""

    filename: str
    num_layers: int
    input_ids: str
    position_ids: str
    past_key: str
    """Name template of a layer's key cache, holding one `%d`."""
    logits: str
    state_groups: tuple[StateGroup, ...]
    sliding_window: bool


@dataclass(frozen=True)
class _Section:
    """A JSON object that knows its file and its path in it, so that errors can name both."""

    file: Path
    values: Mapping[str, Any]
    path: str = ""
    notes: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(self, name: str, problem: str) -> FolderError:
        return FolderError(f"{self.file}: key {self.key(name)!r} {problem}.")

    def section(self, name: str) -> "_Section":
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, "is missing" if value is None else "isn't an object")
        return _Section(self.file, value, self.key(name), self.notes)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.fail(name, "is missing" if value is None else f"should be a text, not {value!r}")
        return value

    def integer(self, name: str, *, at_least: int = 1, at_most: int = 2**31 - 1) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, "is missing" if value is None else f"should be an integer, not {value!r}")
        if value < at_least:
            raise self.fail(name, f"is {value}, below {at_least}")
        if value > at_most:
            raise self.fail(name, f"is {value}, above {at_most}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An id or a list of ids; absent and null mean none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool):
                raise self.fail(name, f"should be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(ids))

    def note_unknown(self, known: frozenset[str]) -> None:
        for name in self.values.keys() - known:
            self.notes.append(f"{self.file.name}: key {self.key(name)!r} isn't known and was ignored.")


def read_config(folder: Path) -> tuple[FolderConfig, DecoderManifest]:
    """Read the folder's configuration.

    Raises FolderError, naming file and key, for a missing folder or file, broken JSON, a missing key, a
    wrong type, or a token id outside the vocabulary.
    """
    if not _exists(folder):
        raise FolderError(f"The model folder {folder} doesn't exist.")
    if not folder.is_dir():
        raise FolderError(f"The model folder {folder} is a file; give the folder that holds {CONFIG_NAME}.")
    top = _read_json(folder / CONFIG_NAME)
    top.note_unknown(_TOP_KEYS)
    model = top.section("model")
    model.note_unknown(_MODEL_KEYS)
    decoder = model.section("decoder")
    decoder.note_unknown(_DECODER_KEYS)
    if "pipeline" in decoder.values:
        raise decoder.fail("pipeline", "splits the decoder into several graphs, which isn't supported")

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
    return config, _manifest(decoder)


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_json(file: Path) -> _Section:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(f"The model folder {file.parent} has no {file.name}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{file} can't be read: {error}.") from None
    except json.JSONDecodeError as error:
        raise FolderError(f"{file} isn't valid JSON (line {error.lineno}: {error.msg}).") from None
    except (RecursionError, ValueError) as error:
        raise FolderError(f"{file} can't be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise FolderError(f"{file} should hold one JSON object.")
    return _Section(file, values)


def _search(top: _Section) -> _Section:
    if top.values.get("search") is None:
        top.notes.append(f"{top.file.name}: key 'search' is missing; defaults are used.")
        return _Section(top.file, {}, "search", top.notes)
    return top.section("search")


def _static_batching(top: _Section) -> bool:
    if top.values.get("engine") is None:
        return False
    engine = top.section("engine").values
    return engine.get("static_batching") is not None and engine.get("dynamic_batching") is None


def _eos_token_ids(folder: Path, model: _Section, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids from the model section, else from the generation configuration beside it."""
    source, ids = model, model.token_ids("eos_token_id")
    if not ids and (folder / GENERATION_NAME).exists():
        source = _read_json(folder / GENERATION_NAME)
        ids = source.token_ids("eos_token_id")
        if ids:
            model.notes.append(f"{GENERATION_NAME}: key 'eos_token_id' is used; {CONFIG_NAME} has none.")
    if not ids:
        model.notes.append(f"{CONFIG_NAME}: key 'model.eos_token_id' is missing; only limits end a turn.")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise source.fail("eos_token_id", f"holds {token}, outside the vocabulary of {vocab_size}")
    return ids


def _lenient_id(model: _Section, name: str, vocab_size: int) -> int | None:
    """The first id listed, or None; these ids change no mathematics, so an odd one is only noted."""
    ids = model.token_ids(name)
    if len(ids) > 1:
        model.notes.append(f"{model.file.name}: key {model.key(name)!r} is a list; {ids[0]} is used.")
    if ids and not 0 <= ids[0] < vocab_size:
        model.notes.append(
            f"{model.file.name}: key {model.key(name)!r} is {ids[0]}, no token; it is ignored."
        )
        return None
    return ids[0] if ids else None


def _manifest(decoder: _Section) -> DecoderManifest:
    inputs, outputs = decoder.section("inputs"), decoder.section("outputs")
    past_key = inputs.text("past_key_names", "past_key_values.%d.key")
    if past_key.count("%d") != 1 or past_key.count("%") != 1:
        raise inputs.fail("past_key_names", f"should hold exactly one %d, not {past_key!r}")
    num_layers = decoder.integer("num_hidden_layers", at_most=_MOST_LAYERS)
    return DecoderManifest(
        filename=decoder.text("filename"),
        num_layers=num_layers,
        input_ids=inputs.text("input_ids", "input_ids"),
        position_ids=inputs.text("position_ids", "position_ids"),
        past_key=past_key,
        logits=outputs.text("logits", "logits"),
        state_groups=_state_groups(decoder, num_layers),
        sliding_window=decoder.values.get("sliding_window") is not None,
    )


def _state_groups(decoder: _Section, num_layers: int) -> tuple[StateGroup, ...]:
    groups = decoder.values.get("state_groups")
    if groups is None:
        return (StateGroup("paged_kv", tuple(range(num_layers)), derived=True),)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise decoder.fail("state_groups", "should be a list of objects")
    return tuple(_state_group(decoder, index, group, num_layers) for index, group in enumerate(groups))


def _state_group(decoder: _Section, index: int, values: Mapping[str, Any], num_layers: int) -> StateGroup:
    group = _Section(decoder.file, values, decoder.key(f"state_groups[{index}]"), decoder.notes)
    kind = group.text("kind")
    if kind not in _STATE_KINDS:
        raise group.fail("kind", f"is {kind!r}, not one of {', '.join(sorted(_STATE_KINDS))}")
    layer_ids = group.token_ids("layer_ids")
    if len(layer_ids) != len(values.get("layer_ids") or ()):
        raise group.fail("layer_ids", "lists a layer twice")
    for layer in layer_ids:
        if not 0 <= layer < num_layers:
            raise group.fail("layer_ids", f"holds {layer}, outside the {num_layers} layers")
    return StateGroup(kind, layer_ids, derived=False)


def layer_pattern(template: str) -> re.Pattern[str]:
    """A pattern that matches names made from a `%d` template and captures the layer."""
    before, after = template.split("%d")
    return re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
