"""Stop strings on streamed text: text is released once it can be no part of a stop string any more.

Stop strings match decoded text, so a match may begin and end inside tokens. The text held back is the longest
end of the text that begins some stop string. It is shorter than the longest stop string, and every match still
to come lies in it and the tokens after it; so a token costs the same at any length of the text.

Like `StreamState`, a `TextState` is a value: taking tokens back means keeping the value from before them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxengine.text import stream
from jaxengine.text.stream import StreamState

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TextState:
    """Where a text with stop strings stands.

    Attributes:
        stream: The decoder's state.
        held: The decoded text that isn't released yet.
    """

    stream: StreamState
    held: str


@dataclasses.dataclass(frozen=True)
class Advance:
    """What one token came to.

    Attributes:
        state: The state after the token; after a stop that of a new text.
        text: The text that the token releases.
        stop: The stop string that the token completes, or None.
    """

    state: TextState
    text: str
    stop: str | None


def start(tokenizer: "Tokenizer") -> TextState:
    """The state before a text's first token."""
    return TextState(stream.start(tokenizer), "")


def advance(tokenizer: "Tokenizer", stops: tuple[str, ...], state: TextState, token: int) -> Advance:
    """Adds one token to the text.

    The first token that completes a match ends the text. Of several matches that it completes, the one that
    begins earliest counts, and of those the longest: so nothing released is part of any of them. What the
    token carries after the match is dropped.

    A character is matched once it is complete, so an incomplete one at the end of a text is never taken for a
    U+FFFD in a stop string. Bytes that later ones show to be no UTF-8 are U+FFFD in the decoded text, and match.

    Args:
        tokenizer: The model's tokenizer.
        stops: The stop strings, none of them empty, the same at every token of a text.
        state: The state before the token.
        token: The token's id.
    """
    stream_state, new = stream.advance(tokenizer, state.stream, token)
    text = state.held + new
    matches = [(begin, -len(stop), stop) for stop in stops if (begin := text.find(stop)) >= 0]
    if matches:
        begin, _, stop = min(matches)
        return Advance(start(tokenizer), text[:begin], stop)
    begin = _held_from(stops, text)
    return Advance(TextState(stream_state, text[begin:]), text[:begin], None)


def finish(tokenizer: "Tokenizer", state: TextState) -> str:
    """What a text that ends without a stop still releases: held text, and U+FFFD for an incomplete character."""
    return state.held + stream.finish(tokenizer, state.stream)


def _held_from(stops: tuple[str, ...], text: str) -> int:
    """Where the longest end of `text` begins that begins some stop string; `text` holds none of them."""
    longest = max(map(len, stops), default=1)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        end = text[begin:]
        if any(stop.startswith(end) for stop in stops):
            return begin
    return len(text)


def require_stops(label: str, value: object) -> tuple[str, ...]:
    """Returns stop strings, given as one string or a sequence of them, as a tuple.

    Raises:
        TypeError: It is neither, or an entry is no string.
        ValueError: A stop string is empty, or holds a lone surrogate.
    """
    if isinstance(value, str):
        return (_stop(label, value),)
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise TypeError(f"{label} is {value!r}; give a string or a list of strings")
    return tuple(_stop(f"{label}[{place}]", entry) for place, entry in enumerate(value))


def _stop(label: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{label} is {value!r}; give a string")
    if not value:
        raise ValueError(f"{label} is empty and would match anywhere; give at least one character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        culprit = value[error.start]
        raise ValueError(
            f"{label} holds {culprit!r}, half of a character; give valid Unicode text"
        ) from error
    return value
