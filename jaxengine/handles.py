"""What an engine gives into the caller's hands: requests, their events, and iterators over events.

A handle names a request by engine and id and holds nothing else. It does not keep its engine alive: once the engine is
closed or gone, its handles are tombstones that answer questions and refuse work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxengine import drafts, requests
from jaxengine.config import TurnOptions
from jaxengine.errors import RequestStateError
from jaxengine.events import EngineErrorCode, EngineEventFlags, FinishReason, TokenLogprobs, Usage
from jaxengine.state import EngineState, RequestStatus, row_of

if TYPE_CHECKING:
    from jaxengine.engine import Engine


@dataclasses.dataclass(frozen=True)
class Event:
    """One event in the caller's hands; it keeps its request's handle alive.

    Attributes:
        request: The request, or None for an event of the engine as a whole.
        turn_id: The request's turn, or 0.
        flags: Which of the other fields carry something; test bits.
        token: A visible token; valid with TOKEN.
        finish_reason: Valid with TURN_FINISHED.
        error_code: Valid with FAILED, CAPACITY_BLOCKED and RETRYABLE.
        detail: A sentence for people, or empty.
        usage: The turn's counts; valid with TURN_FINISHED.
        text: What may be shown now: text of this and of earlier tokens that can be no part of a stop string, with no
            broken characters; empty where the model has no tokenizer. All of a turn's texts joined are its text.
        stop: The stop string that ended the turn, or empty.
        logprobs: Of the token, or None.
        prompt_logprobs: Of each token of the turn's input, with the turn's first choice, where they are asked for; None
            for a first token that nothing predicts: that of the sequence, and one behind an EOS.
    """

    request: Request | None
    turn_id: int
    flags: EngineEventFlags
    token: int
    finish_reason: FinishReason
    error_code: EngineErrorCode
    detail: str
    usage: Usage
    text: str
    stop: str
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


class EventStream:
    """Events one by one, as they come: `for event in stream`, or `async for event in stream`.

    It steps the engine whenever no event is retained and ends when nothing is pending. The asynchronous form lets other
    tasks run between steps; a step itself holds the thread that owns the engine.
    """

    def __init__(self, pull: Callable[[], list[Event] | None]) -> None:
        """Made by `Engine.stream` and `Request.stream`; `pull` returns at most one event, or None at the end."""
        self._pull = pull

    def __iter__(self) -> Iterator[Event]:
        """Steps the engine until nothing is pending."""
        while (events := self._pull()) is not None:
            yield from events

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Steps the engine until nothing is pending, giving way to other tasks after each step."""
        while (events := self._pull()) is not None:
            for event in events:
                yield event
            await asyncio.sleep(0)


class Request:
    """A handle to one request; dropping the last one closes the request at the engine's next call."""

    def __init__(self, engine: Engine, request_id: int) -> None:
        """Made by `Engine.create_request` and `Engine.attach`."""
        self._engine_ref = weakref.ref(engine)
        self.id = request_id

    def __repr__(self) -> str:
        return f"Request(id={self.id}, status={self.status.name})"

    def __deepcopy__(self, memo: object) -> Request:
        # A handle is an identity: `dataclasses.asdict(event)` must not make a second one.
        return self

    def __copy__(self) -> Request:
        return self

    @property
    def status(self) -> RequestStatus:
        """Where the request is in its life; CLOSED once its engine is."""
        state = self._state()
        return RequestStatus.CLOSED if state is None else requests.status_of(state, self.id)

    @property
    def length(self) -> int:
        """Tokens of the sequence, prompts and generated ones; 0 once closed."""
        return self._count("length")

    @property
    def processed_length(self) -> int:
        """Tokens whose keys and values are committed; 0 once closed."""
        return self._count("processed")

    @property
    def turn_id(self) -> int:
        """The newest turn's id; 0 before the first and once closed."""
        return self._count("turn")

    @property
    def max_session_tokens(self) -> int:
        """The limit on `length`; 0 once closed."""
        return self._count("max_session")

    @property
    def tokens(self) -> np.ndarray:
        """int32[length], the sequence; empty once closed."""
        state = self._state()
        row = -1 if state is None else row_of(state.control, self.id)
        if state is None or row < 0:
            return np.zeros(0, np.int32)
        return state.control.tokens.read(row, 0, int(state.control.requests.length[row]))

    def begin_turn(
        self, tokens: Sequence[int] | np.ndarray | jax.Array, options: TurnOptions | None = None
    ) -> int:
        """Queues input and returns the new turn's id; see `jaxengine.begin_turn` for what is refused.

        The turn's grammar is compiled first; see `Engine.prepare`.
        """
        engine = self._engine()
        engine.prepare(options)
        return engine.apply(requests.begin_turn, self.id, tokens, options)

    def set_draft_tokens(self, tokens: Sequence[int] | np.ndarray | jax.Array) -> None:
        """Proposes what follows; see `jaxengine.set_draft_tokens` for what is refused."""
        self._engine().apply(
            lambda state, request_id: (drafts.set_draft_tokens(state, request_id, tokens), None), self.id
        )

    def cancel_turn(self, turn_id: int) -> bool:
        """Ends a live turn between steps; see `jaxengine.cancel_turn`."""
        return self._engine().apply(requests.cancel_turn, self.id, turn_id)

    def stream(self) -> EventStream:
        """Iterates over this request's events and those of the engine as a whole, until its turn is over.

        Events of other requests stay retained for whoever runs or iterates next. Closing the request ends the iterator.
        """
        return EventStream(self._pull)

    def close(self) -> None:
        """Frees the request's blocks and place and drops its undrained events. Closing twice is nothing."""
        if self._state() is not None:
            self._engine().apply(
                lambda state, request_id: (requests.close_request(state, request_id), None), self.id
            )

    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None or engine.state_of(self) is None:
            raise RequestStateError(
                f"request {self.id} is CLOSED with its engine; make a new engine, "
                "or use the handle that attach returned"
            )
        return engine

    def _state(self) -> EngineState | None:
        engine = self._engine_ref()
        return None if engine is None else engine.state_of(self)

    def _pull(self) -> list[Event] | None:
        engine = self._engine_ref()
        return None if engine is None else engine.pull(self)

    def _count(self, column: str) -> int:
        state = self._state()
        row = -1 if state is None else row_of(state.control, self.id)
        return 0 if state is None or row < 0 else int(getattr(state.control.requests, column)[row])
