"""Grammars: JSON schemas, regular expressions and Lark, refused when they are made if nothing can come of them.

The library is llguidance, imported when the first grammar is made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

# Left to itself the library allows any run of blanks between the parts of JSON, so that a model could write blanks up
# to its limit. This spacing is that of `json.dumps`; being fixed, it is forced too.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACING_KEYS = {*_SPACING, "whitespace_pattern"}
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
# What a Lark rule may have in brackets that says nothing of its language, and that the library leaves to its caller.
_WITHOUT_EFFECT = ("temperature", "capture", "stop_capture")
# Strings, regular expressions and comments, as the library's lexer takes them.
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/')
_ATTRIBUTES = re.compile(r"\[([^\[\]\n]*)\][ \t]*:")
MOST_FORCED_BYTES = 20_000
"""Most bytes of text that a grammar may force at one place, where it is looked at."""
BYTES = [bytes([byte]) for byte in range(256)]
ENDLESS = f"it forces more than {MOST_FORCED_BYTES} bytes of text at one place; let it end sooner"


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a turn may say, from one of the three constructors; equal grammars share what is compiled for them.

    Attributes:
        kind: The language that `text` is in.
        text: The schema as JSON, the regular expression or the Lark grammar.

    Raises:
        TypeError: The text is none.
        ValueError: There is no such language, or the text is empty, invalid, or nothing satisfies it.
        ImportError: llguidance isn't installed.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in list(_NAMES):
            raise ValueError(f"the grammar's kind is {self.kind!r}; use one of {', '.join(_NAMES)}")
        name = _NAMES[self.kind]
        if not isinstance(self.text, str):
            raise TypeError(f"the {name} is {self.text!r}; give a text")
        if not self.text:
            raise ValueError(f"the {name} is empty; give one that has something to say")
        if reason := _without_effect(self) or _refusal(self):
            raise ValueError(f"the {name} can't be used: {reason}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON that satisfies a schema, with properties in the schema's order.

        Without spacing in the schema's own `x-guidance` (the library's options), it is that of `json.dumps`: no line
        breaks, one blank after a comma or colon. So blanks between the parts of the JSON are bounded.

        Args:
            schema: A JSON schema, or its text.

        Raises:
            ValueError: It is no JSON schema, nothing satisfies it, or it asks for what the library can't enforce.
            ImportError: llguidance isn't installed.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            value = {} if value is True else value
            if not isinstance(value, Mapping):
                reason = "nothing satisfies false" if value is False else "it is no object"
                raise ValueError(reason)
            options = value.get("x-guidance", {})
            if isinstance(options, Mapping) and not _SPACING_KEYS & options.keys():
                value = {**value, "x-guidance": {**_SPACING, **options}}
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema can't be used: {error}") from error
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole, in the syntax of Rust's `regex`, without look-around.

        Raises:
            ValueError: The pattern is empty, invalid, or matches nothing.
            ImportError: llguidance isn't installed.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a Lark grammar, in the library's dialect, derives from its rule `start`.

        Special tokens appear only where the grammar names them, and those that end a turn only at its end.

        Raises:
            ValueError: The grammar is empty, invalid, incomplete, or matches nothing; or a rule has an attribute that
                the engine doesn't go by: `temperature`, `capture` or `stop_capture`.
            ImportError: llguidance isn't installed.
        """
        return cls("lark", text)


def _without_effect(grammar: Grammar) -> str:
    """Names a rule's attribute that would be ignored; empty if there is none."""
    if grammar.kind != "lark":
        return ""
    for attributes in _ATTRIBUTES.findall(_LITERALS.sub("", grammar.text)):
        for attribute in attributes.split(","):
            name = attribute.partition("=")[0].strip()
            if name in _WITHOUT_EFFECT:
                return f"the attribute {name} of its rules has no effect here; leave it out"
    return ""


def _refusal(grammar: Grammar) -> str:
    """Why the library refuses a grammar, compiled for a vocabulary of bytes; empty if there is a first token."""
    llguidance = library()
    try:
        compiled = source(grammar)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(compiled, limits=limits())
        reason = messages[0] if failed else ""
        # A warning is about special tokens, which only the model's own tokenizer can judge.
        if (
            not messages
            and may_force_endlessly(grammar)
            and forced_bytes(byte_scout(grammar), BYTES) > MOST_FORCED_BYTES
        ):
            return ENDLESS
        if not messages:
            matcher = llguidance.LLMatcher(_byte_table(), compiled, log_level=0, limits=limits())
            matcher.compute_bitmask()
            reason = matcher.get_error()
    except (ValueError, RecursionError) as error:
        reason = str(error)
    return one_line(reason)


def source(grammar: Grammar) -> str:
    """The grammar in the library's own notation."""
    if grammar.kind == "regex":
        return library().LLMatcher.grammar_from_regex(grammar.text)
    key, value = (
        ("json_schema", json.loads(grammar.text))
        if grammar.kind == "json_schema"
        else ("lark_grammar", grammar.text)
    )
    return json.dumps({"grammars": [{key: value}]})


def may_force_endlessly(grammar: Grammar) -> bool:
    """Whether some text of a grammar may force more text without end.

    The library follows forced text to its end before it returns, and bounds the rules on the way but not one terminal:
    of `w t` with w = /a+/ and t = "a" it never comes back. A regular expression alone may always end, and so may each
    part of JSON, unless the schema has spacing of its own.
    """
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        options = schema.get("x-guidance") if isinstance(schema, Mapping) else None
        return isinstance(options, Mapping) and any(
            options.get(key) != _SPACING.get(key) for key in _SPACING_KEYS
        )
    return grammar.kind == "lark"


def source_without_forcing(grammar: Grammar) -> str:
    """The same language in the library's own notation; its matchers follow no forced text, so that they return."""
    text = grammar.text if grammar.kind == "lark" else f"start: %json {grammar.text}"
    # The last such line counts.
    return json.dumps({"grammars": [{"lark_grammar": f'{text}\n%llguidance {{"no_forcing": true}}\n'}]})


def byte_scout(grammar: Grammar) -> Any:
    """A matcher of `source_without_forcing` whose tokens are bytes, and which knows no special ones."""
    compiled = source_without_forcing(grammar)
    return library().LLMatcher(_byte_table(), compiled, log_level=0, limits=limits())


def forced_bytes(scout: Any, pieces: Sequence[bytes]) -> int:
    """How many bytes a grammar forces next, a few more than `MOST_FORCED_BYTES` if there are more.

    Args:
        scout: A matcher from `source_without_forcing`; it moves on.
        pieces: The bytes of each of its tokens.
    """
    length = 0
    while length <= MOST_FORCED_BYTES and not scout.is_accepting():
        mask = np.frombuffer(scout.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        # More tokens than one text has beginnings mean a choice; none is a dead end, which is told elsewhere.
        if scout.is_error() or not 0 < len(allowed) <= 256 or allowed[-1] >= len(pieces):
            break
        longest = max(allowed.tolist(), key=lambda token: len(pieces[token]))
        text = pieces[longest]
        if not text or not all(text.startswith(pieces[token]) for token in allowed.tolist()):
            break
        scout.consume_token(longest)
        length += len(text)
    return length


@functools.cache
def limits() -> Any:
    """Limits of a grammar; errors don't repeat it.

    The library counts symbols in 16 bits and panics beyond, after minutes for a large grammar; this refuses it in
    seconds.
    """
    return library().LLParserLimits(verbose_errors=False, max_grammar_size=50_000)


@functools.cache
def _byte_table() -> Any:
    return library().LLTokenizer("byte")


def library() -> Any:
    """The library.

    Raises:
        ImportError: It isn't installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("grammars need the library llguidance; install jaxengine[guidance]") from error
    return llguidance


def one_line(reason: str) -> str:
    """The library's reason on one line of bounded length, without its dump of the parser."""
    reason = textwrap.shorten(reason.partition("\n<")[0], 500)
    return "no text satisfies it" if reason == "NoExtensionBias" else reason
