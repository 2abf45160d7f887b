"""Token ids to text, one token at a time, with no broken characters.

Each token adds its bytes to a UTF-8 decoder that gives back the characters complete so far. What waits
inside is at most three bytes, whatever the text, so a token costs the same at any length; a U+FFFD that the
text really holds is a complete character like any other and doesn't wait.

A decoder's whole memory is a small value, `StreamState`. `advance` makes the next one and leaves the old one
as it was, so a token that is taken back costs nothing: keep the value from before it.
"""

import codecs
import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import Tokenizer

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


@dataclasses.dataclass(frozen=True)
class StreamState:
    """Where a text being decoded stands.

    Attributes:
        incomplete: The bytes of a character that isn't complete, at most three.
        begun: Whether a token has given the text its first piece.
        leading_spaces: Most spaces still to remove from the start of the text.
    """

    incomplete: bytes
    begun: bool
    leading_spaces: int


def start(tokenizer: "Tokenizer") -> StreamState:
    """The state before a text's first token."""
    return StreamState(b"", begun=False, leading_spaces=tokenizer.piece_rules.leading_spaces)


def advance(tokenizer: "Tokenizer", state: StreamState, token: int) -> tuple[StreamState, str]:
    """The state after `token`, and the characters that it completes; none while a character is incomplete.

    Special tokens and ids outside the vocabulary change nothing and add nothing.
    """
    piece = tokenizer.piece(token, first=not state.begun)
    if piece is None:
        return state, ""
    utf8 = _utf8(tokenizer, state)
    text = _shown(utf8.decode(piece))
    incomplete, _ = utf8.getstate()
    spaces = state.leading_spaces
    if spaces and text:
        stripped = text.lstrip(" ")
        leading = len(text) - len(stripped)
        text = text[min(leading, spaces) :]
        spaces = 0 if stripped else max(spaces - leading, 0)
    return StreamState(incomplete, begun=True, leading_spaces=spaces), text


def finish(tokenizer: "Tokenizer", state: StreamState) -> str:
    """What a text that ends here still holds: U+FFFD for an incomplete character, or nothing."""
    return _shown(_utf8(tokenizer, state).decode(b"", True)) if state.incomplete else ""


def _utf8(tokenizer: "Tokenizer", state: StreamState) -> codecs.IncrementalDecoder:
    """A decoder that has read the incomplete character."""
    # surrogateescape keeps invalid bytes apart, one code point each that valid UTF-8 never gives.
    errors = "surrogateescape" if tokenizer.piece_rules.byte_fallback else "replace"
    utf8 = codecs.getincrementaldecoder("utf-8")(errors)
    utf8.setstate((state.incomplete, 0))
    return utf8


def _shown(text: str) -> str:
    """Decoded text with U+FFFD for each byte kept apart."""
    return text if text.isascii() else _ESCAPED_BYTE.sub("\ufffd", text)


class StreamDecoder:
    """Decodes one text token by token: every `push` and the final `flush`, joined, are what `decode` gives.

    Special tokens and ids outside the vocabulary add nothing. Bytes that are no UTF-8 become U+FFFD as in
    `tokenizers`: one for each byte where the vocabulary spells bytes as `<0xHH>`, else one for each longest
    piece of a character. There is one difference: where a run of `<0xHH>` tokens holds a broken character,
    `tokenizers` replaces the complete ones in that run too. Here they are kept, since they have long been
    sent.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._state = start(tokenizer)

    def push(self, token: int) -> str:
        """The characters that `token` completes; empty while a character is incomplete."""
        self._state, text = advance(self._tokenizer, self._state, token)
        return text

    def flush(self) -> str:
        """What is left of an incomplete character, U+FFFD or nothing; the next `push` starts a new text."""
        text = finish(self._tokenizer, self._state)
        self._state = start(self._tokenizer)
        return text

    @property
    def _utf8(self) -> codecs.IncrementalDecoder:
        """What waits, to look at: a decoder made for the purpose."""
        return _utf8(self._tokenizer, self._state)
