"""The bytes that one token stands for.

`tokenizers` decodes a whole list of ids at once. A stream needs the share of each token, so the decoder
that a `tokenizer.json` names is read as rules here: how a token's string becomes bytes, and what happens at
the start of the text. Concatenated bytes and one UTF-8 decoder then give the same text as the whole list, at
a constant cost a token and with no guess about which characters are complete.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxengine.text.errors import TextError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table): character to byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_ALPHABET = _byte_level_alphabet()


@dataclasses.dataclass(frozen=True)
class PieceRules:
    """How token strings become bytes.

    Attributes:
        byte_level: Strings are written in the byte-level alphabet; one that isn't stands for itself.
        replacements: Pairs (old, new) applied to each token's string, in order.
        byte_fallback: A token `<0xHH>` is that byte.
        dropped_in_first: Characters that vanish from the first token of a text.
        leading_spaces: Most spaces removed from the start of a text.
        joiner: What stands between two tokens.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    dropped_in_first: str = ""
    leading_spaces: int = 0
    joiner: bytes = b""

    def piece(self, token: str, *, first: bool) -> bytes:
        """The bytes of a token's string; `first` where it is the first of its text."""
        if self.byte_level:
            known = [_BYTES_OF_ALPHABET.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if first:
            token = "".join(character for character in token if character not in self.dropped_in_first)
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        piece = bytes([int(byte[1], 16)]) if byte else token.encode()
        return piece if first else self.joiner + piece


def read_piece_rules(decoder: Mapping[str, Any] | None) -> PieceRules:
    """The rules of a decoder, given as the `decoder` entry of a `tokenizer.json`; None joins with spaces.

    Raises:
        TextError: The decoder looks at several tokens at a time, or its steps have an order not known here.
    """
    if decoder is None:
        return PieceRules(joiner=b" ")
    rules = PieceRules()
    fused = False
    for step in _flat(decoder):
        match step:
            case {"type": "ByteLevel"}:
                rules = dataclasses.replace(rules, byte_level=True)
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (
                fused or rules.byte_fallback
            ):
                rules = dataclasses.replace(rules, replacements=(*rules.replacements, (old, new)))
            case {"type": "ByteFallback"} if not fused:
                rules = dataclasses.replace(rules, byte_fallback=True)
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                rules = dataclasses.replace(rules, leading_spaces=start)
            case {"type": "Metaspace", "replacement": mark} if not fused:
                keeps = step.get("prepend_scheme", "always") == "never"
                pairs = (*rules.replacements, (mark, " "))
                rules = dataclasses.replace(rules, replacements=pairs, dropped_in_first="" if keeps else mark)
            case _:
                raise TextError(
                    f"tokenizer.json decodes with {step.get('type')} ({dict(step)}), which can't be streamed;"
                    " known are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order"
                )
    return rules


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, sequences opened up."""
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _flat(step)
    else:
        yield decoder
