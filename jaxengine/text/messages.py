"""Messages as plain data, so that what a user wrote stays text.

A chat template joins its own control tokens and the users' words into one string, and a tokenizer can't
tell who wrote which. So a message that spells a control token (`<|im_end|>`, say) could end its turn and
speak as the system. `without_control_tokens` puts a separator into each such spelling. `Tokenizer` gives the
separator a token of its own, so that the spelling becomes two pieces of ordinary text, and drops that token
again.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxengine.text.errors import TextError
from jaxengine.text.template import Message

SEPARATOR = "\ue000jaxengine separator\ue001"
"""Private-use characters around a name, which no vocabulary holds."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A deep copy of `messages` in dicts, lists, strings, numbers, bools and None.

    Raises:
        TextError: No messages, a message without a role, or a value that is no plain data.
    """
    values: object = messages
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise TextError(f"a chat is a list of messages with at least one in it, not {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TextError(f"a chat message is a mapping with 'role' and 'content', not {message!r}")
    return [_mapped(message, str) for message in messages]


def without_control_tokens(
    messages: list[dict[str, Any]], control_tokens: Iterable[str]
) -> list[dict[str, Any]]:
    """`messages` with a separator after the first character of each control token that they spell.

    A control token of a single character can't be taken apart and is left.
    """
    spellings = [re.escape(token) for token in control_tokens if len(token) > 1]
    if not spellings:
        return messages
    # Looking ahead from every character finds spellings that overlap too.
    first_character = re.compile(f"(?=(?:{'|'.join(spellings)}))(.)", re.DOTALL)
    return [
        _mapped(message, lambda text: first_character.sub(lambda match: match[1] + SEPARATOR, text))
        for message in messages
    ]


def absent_marker(messages: list[dict[str, Any]]) -> str:
    """A string without white space that no string in `messages` contains."""
    everything = json.dumps(messages, ensure_ascii=False)
    marker = "\ue000reply\ue001"
    while marker in everything:
        marker = f"\ue000{marker}\ue001"
    return marker


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with `change` applied to each string but the keys.

    Raises:
        TextError: A value is no plain data, so a template in the sandbox should not see it.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {str(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    raise TextError(f"a chat message holds {value!r}; give strings, numbers, lists and mappings only")
