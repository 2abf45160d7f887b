"""Token ids to text, one token at a time, with no broken characters.

Each token adds its bytes to a UTF-8 decoder that gives back the characters complete so far. What waits
inside is at most three bytes, whatever the text, so a token costs the same at any length; a U+FFFD that the
text really holds is a complete character like any other and doesn't wait.
"""

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import Tokenizer

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


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
        self._by_byte = tokenizer.piece_rules.byte_fallback
        self._start()

    def _start(self) -> None:
        # surrogateescape keeps invalid bytes apart, one code point each that valid UTF-8 never gives.
        errors = "surrogateescape" if self._by_byte else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._first = True
        self._leading_spaces = self._tokenizer.piece_rules.leading_spaces

    def push(self, token: int) -> str:
        """The characters that `token` completes; empty while a character is incomplete."""
        piece = self._tokenizer.piece(token, first=self._first)
        if piece is None:
            return ""
        self._first = False
        return self._text(piece, final=False)

    def flush(self) -> str:
        """What is left of an incomplete character, U+FFFD or nothing; the next `push` starts a new text."""
        text = self._text(b"", final=True)
        self._start()
        return text

    def _text(self, piece: bytes, *, final: bool) -> str:
        text = self._utf8.decode(piece, final)
        if self._by_byte:
            text = _ESCAPED_BYTE.sub("\ufffd", text)
        while self._leading_spaces and text:
            if not text.startswith(" "):
                self._leading_spaces = 0
                break
            text = text[1:]
            self._leading_spaces -= 1
        return text
