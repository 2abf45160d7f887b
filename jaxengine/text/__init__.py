"""Text at the borders of a model: prompts and chats become token ids, generated ids become text."""

from jaxengine.text.errors import TextError
from jaxengine.text.stops import TextState, require_stops
from jaxengine.text.stream import StreamDecoder, StreamState
from jaxengine.text.template import ChatTemplate, Message
from jaxengine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Message",
    "StreamDecoder",
    "StreamState",
    "TextError",
    "TextState",
    "Tokenizer",
    "require_stops",
]
