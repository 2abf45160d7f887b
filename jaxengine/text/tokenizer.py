"""A model folder's tokenizer: raw text, chats and generated ids, each by its own rule about special tokens.

Raw text follows `tokenizer.json` to the letter: it gets the tokens that the post-processor adds (a BOS,
mostly), and the spelling of a special token is that token. A chat follows its template instead:

- The first turn begins with exactly one BOS where the tokenizer begins plain text with one, whether or not
  the template writes it too. Where the tokenizer adds none, the template alone decides.
- A later turn is only what comes after the model's last reply. The template renders the whole chat with a
  marker as that reply, and what follows the marker is the answer: first the end-of-turn token, which the
  engine neither appends nor emits when the model generates it, then whatever stands between turns, then the
  new messages. It is the same after a reply cut by a limit or cancelled, and it doesn't depend on how a
  template rewrites replies (trims them, drops their reasoning), because the reply itself is already resident
  as tokens. No BOS is added; one that the template writes between turns, as Llama 2's does, is part of that
  format and stays.
- Special tokens spelled in a message are text (see `messages`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxengine.text.errors import TextError
from jaxengine.text.messages import SEPARATOR, absent_marker, plain_messages, without_control_tokens
from jaxengine.text.pieces import PieceRules, read_piece_rules
from jaxengine.text.stream import StreamDecoder
from jaxengine.text.template import ChatTemplate, Message


class Tokenizer:
    """Text to token ids and back, for one model.

    Args:
        backend: The tokenizer proper. Truncation and padding are switched off in it.
        chat_template: The chat template, if the model has one.

    Raises:
        TextError: Its decoder isn't one that can be streamed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.piece_rules: PieceRules = read_piece_rules(_state(backend.decoder))
        added = backend.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._has_normalized = any(entry.normalized for entry in added.values() if entry.special)
        self._strings: dict[int, str | None] = {}

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a model folder, with its chat template if there is one.

        Reads `tokenizer.json` and, where they exist, `tokenizer_config.json` (texts of the special tokens,
        and the template) and `chat_template.jinja`, which goes before the template in the configuration.

        Raises:
            TextError: A file is missing or can't be read; the message names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise TextError(
                f"{path} can't be read ({error.strerror}); put the model's tokenizer there"
            ) from error
        except Exception as error:  # the library raises nothing narrower
            raise TextError(
                f"{path} is no tokenizer that this version of tokenizers reads: {error}"
            ) from error
        config = _read_config(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, _special_texts(config))
        return cls(backend, template)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The special tokens, which no text shows, and how each is spelled."""
        return self._special

    def require_fits(self, logits_width: int) -> None:
        """Raises `TextError` if the tokenizer has ids that a model with so many logits can't take or give."""
        if self.vocab_size > logits_width:
            raise TextError(
                f"the tokenizer has ids up to {self.vocab_size - 1} but the model only {logits_width} logits; "
                "put the tokenizer that belongs to the model in its folder"
            )

    @functools.cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that begin plain text, a BOS mostly; empty where the tokenizer adds none."""
        for text in ("a", *self._backend.get_vocab()):
            encoding = self._backend.encode(text, add_special_tokens=True)
            if 0 in encoding.special_tokens_mask:
                return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text; `add_special_tokens` lets the tokenizer add its BOS and the like.

        Raises:
            TextError: The text holds a lone surrogate, so it is no Unicode text.
        """
        return self._encode(self._backend, text, add_special_tokens)

    def encode_within(self, text: str) -> list[int]:
        """Token ids of text that stands inside a text.

        Nothing is added or put in front, and the spelling of a special token is plain text.

        Raises:
            TextError: The text holds a lone surrogate, so it is no Unicode text.
        """
        return self._encode(self._within, text, add_special_tokens=False)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens` without special tokens; equals the joined strings of a `StreamDecoder`."""
        stream = StreamDecoder(self)
        return "".join([*map(stream.push, tokens), stream.flush()])

    def piece(self, token: int, *, first: bool) -> bytes | None:
        """The bytes of one token, `first` where it begins a text; None for special and unknown tokens."""
        if token not in self._strings:
            hidden = token in self._special
            self._strings[token] = None if hidden else self._backend.id_to_token(token)
        string = self._strings[token]
        return None if string is None else self.piece_rules.piece(string, first=first)

    def chat_ids(self, messages: Sequence[Message], *, first_turn: bool = True) -> list[int]:
        """Token ids to send so that the model answers `messages` next.

        Args:
            messages: The whole chat, each message with `role` and `content`.
            first_turn: True gives the whole prompt. False gives the part after the last assistant message,
                for a request that holds all before it as tokens.

        Raises:
            TextError: There is no chat template, it refuses the messages, or it can't continue after a reply.
        """
        if self.chat_template is None:
            raise TextError("this model has no chat template; give raw text instead")
        messages = plain_messages(messages)
        if first_turn:
            ids = self._chat_encode(messages, self.chat_template.render)
            while self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix:
                ids = ids[len(self.prefix) :]
            return [*self.prefix, *ids]
        return self._chat_encode(messages, self._after_reply, continues=True)

    def _after_reply(self, messages: list[dict[str, Any]]) -> str:
        """What the template writes after the last assistant message."""
        assert self.chat_template is not None
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not places or places[-1] == len(messages) - 1:
            raise TextError("a later turn needs an assistant message and something new after it")
        marker = absent_marker(messages)
        marked = [dict(message) for message in messages]
        marked[places[-1]]["content"] = marker
        _, found, fragment = self.chat_template.render(marked).rpartition(marker)
        if not found:
            raise TextError("the chat template drops earlier replies, so a chat can't go on with it")
        return fragment

    def _chat_encode(
        self,
        messages: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]]], str],
        *,
        continues: bool = False,
    ) -> list[int]:
        """Token ids of a rendered chat in which the messages' own words are never special tokens."""
        guarded = without_control_tokens(messages, self._special.values())
        text = render(guarded)
        if guarded == messages and not self._has_normalized:
            ids = self._encode(self._backend, text, add_special_tokens=False)
            if not continues or not ids or ids[0] in self._special:
                return ids
        # A separator in front keeps the tokenizer from treating a continuation as the beginning of a text,
        # where SentencePiece vocabularies add a space.
        backend, separator = self._guard
        text = SEPARATOR + text if continues else text
        return [
            token for token in self._encode(backend, text, add_special_tokens=False) if token != separator
        ]

    @functools.cached_property
    def _guard(self) -> tuple[tokenizers.Tokenizer, int]:
        """A copy of the tokenizer with a token for the separator, and that token.

        Special tokens are matched in it as written, not after normalisation: else `＜/s＞` in full-width
        letters could turn into one.
        """
        description = json.loads(self._backend.to_str())
        for entry in description["added_tokens"]:
            entry["normalized"] = entry["normalized"] and not entry["special"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        backend.add_special_tokens([tokenizers.AddedToken(SEPARATOR, special=True, normalized=False)])
        separator = backend.token_to_id(SEPARATOR)
        assert separator is not None
        return backend, separator

    @functools.cached_property
    def _within(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that treats no place as the beginning of a text, and no text as special."""
        description = json.loads(self._backend.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            description[part] = description[part] and _without_prefix(description[part])
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        backend.encode_special_tokens = True
        return backend

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            culprit = text[error.start]
            raise TextError(
                f"the text holds {culprit!r}, half of a character; give valid Unicode text"
            ) from error
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)


def _state(decoder: Any) -> Mapping[str, Any] | None:
    """A decoder's description, as `tokenizer.json` holds it."""
    return None if decoder is None else json.loads(decoder.__getstate__())


def _without_prefix(step: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer that puts nothing in front of a text; None where that was all it did."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            return {**step, name: [kept for inner in step[name] if (kept := _without_prefix(inner))]}
        case _:
            return step


def _read_config(path: Path) -> Mapping[str, Any]:
    """`tokenizer_config.json` as a mapping; empty if there is none."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise TextError(f"{path} holds no mapping; take the file from the model's own folder")
    return config


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The Jinja source: the folder's file, else the configuration's entry (of several, the default)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TextError(f"{path} can't be read: {error}") from error
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    if entry is not None and not isinstance(entry, str):
        raise TextError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of named texts"
        )
    return entry


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens by name (`bos_token`); an entry is a text or holds one."""
    entries = {
        name: entry.get("content") if isinstance(entry, dict) else entry
        for name, entry in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in entries.items() if isinstance(text, str)}
