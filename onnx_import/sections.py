"""A JSON object that knows its file and its path in it, so that every complaint about it names both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx_import.errors import FolderError


@dataclass(frozen=True)
class Section:
    """One object of a configuration file. `notes` is shared by the whole file: one sentence a tolerated oddity."""

    file: Path
    values: Mapping[str, Any]
    path: str = ""
    notes: list[str] = field(default_factory=list)
    changed: bool = False
    """Whether the caller's overrides were merged in, which messages tell."""

    def key(self, name: str) -> str:
        """The name's path in the file."""
        return f"{self.path}.{name}" if self.path else name

    def fail(self, name: str, problem: str) -> FolderError:
        """The error that says what is wrong with a key."""
        source = f"{self.file} with the overrides given" if self.changed else f"{self.file}"
        return FolderError(f"{source}: key {self.key(name)!r} {problem}.")

    def child(self, name: str, values: Mapping[str, Any]) -> "Section":
        """An object found under this one."""
        return Section(self.file, values, self.key(name), self.notes, self.changed)

    def section(self, name: str) -> "Section":
        """The object at a key that must be there."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, "is missing" if value is None else "isn't an object")
        return self.child(name, value)

    def text(self, name: str, default: str | None = None) -> str:
        """A text that isn't empty."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.fail(name, "is missing" if value is None else f"should be a text, not {value!r}")
        return value

    def integer(
        self, name: str, *, at_least: int = 1, at_most: int = 2**31 - 1, default: int | None = None
    ) -> int:
        """An integer in a range."""
        value = self.values.get(name, default)
        if not _is_integer(value):
            raise self.fail(name, "is missing" if value is None else f"should be an integer, not {value!r}")
        if value < at_least:
            raise self.fail(name, f"is {value}, below {at_least}")
        if value > at_most:
            raise self.fail(name, f"is {value}, above {at_most}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"should be true or false, not {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An id or a list of ids, each once; absent and null mean none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(_is_integer, ids)):
            raise self.fail(name, f"should be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(ids))

    def layer_ids(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A list of different layers of the model."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            raise self.fail(
                name, "is missing" if value is None else f"should be a list of layers, not {value!r}"
            )
        for index, layer in enumerate(value):
            if not 0 <= layer < num_layers:
                raise self.fail(name, f"holds {layer}, outside the {num_layers} layers")
            if layer in value[:index]:
                raise self.fail(name, f"lists layer {layer} twice")
        return tuple(value)

    def note(self, name: str, remark: str) -> None:
        """Keep a sentence about a key that is tolerated."""
        self.notes.append(f"{self.file.name}: key {self.key(name)!r} {remark}.")

    def note_unknown(self, known: frozenset[str]) -> None:
        """Keep a sentence about each key that nobody reads."""
        for name in self.values.keys() - known:
            self.note(name, "isn't known and was ignored")


def read_json(file: Path, overrides: Mapping[str, Any] | None = None) -> Section:
    """Read a file that holds one JSON object, with the overrides merged into what was read.

    Merging is that of JSON merge patches (RFC 7396): objects merge key by key, None removes a key, anything else
    replaces. Neither the file nor `overrides` is changed.

    Raises FolderError for a missing or unreadable file, broken JSON, and overrides that JSON has no form for.
    """
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
    if overrides is None:
        return Section(file, values)
    if not isinstance(overrides, Mapping):
        raise FolderError(f"The overrides are {overrides!r}; give a mapping shaped like {file.name}.")
    try:
        patch = _plain(overrides, "")
    except RecursionError:
        raise FolderError("The overrides hold themselves, or are nested too deep.") from None
    return Section(file, merged(values, patch), changed=True)


def merged(values: Any, patch: Any) -> Any:
    """`values` with a JSON merge patch applied; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(values) if isinstance(values, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _plain(value: Any, where: str) -> Any:
    """A value as the parser would have made it: a copy of dicts, lists, texts, numbers, booleans and None."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise FolderError(
                    f"The overrides have the key {name!r} in {repr(where) if where else 'their top'}; keys are texts."
                )
        return {name: _plain(item, f"{where}.{name}" if where else name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise FolderError(f"The override {where!r} is {value!r}, which JSON has no form for.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
