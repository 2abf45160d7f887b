"""One turn of one request, from its queued input to its end, as streamed text."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from jaxengine.cli.output import say, write_text
from jaxengine.engine import Engine
from jaxengine.errors import EngineError
from jaxengine.events import EngineEventFlags, TokenLogprobs
from jaxengine.handles import Event, Request


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a turn came to: its text, its tokens with their log-probabilities if asked for, and its last event."""

    text: str
    logprobs: tuple[tuple[int, TokenLogprobs], ...]
    end: Event


def stream_reply(engine: Engine, request: Request) -> Reply:
    """Runs the request's live turn to its end, writing text as it comes; nothing of a stop string is ever written.

    Ctrl-C cancels the turn between two steps, so that the request stays usable; pressed again before the step is
    over, it raises KeyboardInterrupt as usual.

    Raises:
        EngineError: The engine can't go on.
    """
    pieces: list[str] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    with _interrupts() as interrupted:
        while True:
            if interrupted():
                request.cancel_turn(request.turn_id)
            for event in engine.run():
                if event.request is None:
                    if EngineEventFlags.CAPACITY_BLOCKED in event.flags:
                        raise EngineError(f"the engine is short of memory: {event.detail}")
                    continue  # a dropped step, which the engine tries again
                pieces.append(event.text)
                write_text(event.text)
                if EngineEventFlags.TOKEN in event.flags and event.logprobs is not None:
                    logprobs.append((event.token, event.logprobs))
                if EngineEventFlags.TURN_FINISHED in event.flags:
                    return Reply("".join(pieces), tuple(logprobs), event)


def tell_of_grammar(reply: Reply) -> None:
    """Says so if a reply with a grammar was ended before that."""
    if EngineEventFlags.GRAMMAR_INCOMPLETE in reply.end.flags:
        say("jaxengine: the reply is incomplete: it ended before its grammar did")


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed inside the block; the second press raises."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)
