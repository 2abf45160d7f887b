"""The imperative shell: an engine that holds the current state, and handles to its requests.

Every decision is made by the functional core; this file keeps the newest state, turns records into events with handles,
and sees to it that one thread owns both.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType

import jax
import numpy as np

from jaxengine import requests
from jaxengine.config import EngineConfig, RequestOptions, TurnOptions, require_count
from jaxengine.errors import EngineError, RequestStateError, RetryableStepError
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason, Usage
from jaxengine.interrupts import interrupts_deferred
from jaxengine.model import Model
from jaxengine.planning import StepOutcome, plan_step
from jaxengine.state import DEFERRALS, EngineState, RequestStatus, init_state, row_of
from jaxengine.transaction import commit, execute


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
    """

    request: Request | None
    turn_id: int
    flags: EngineEventFlags
    token: int
    finish_reason: FinishReason
    error_code: EngineErrorCode
    detail: str
    usage: Usage


@dataclasses.dataclass(frozen=True)
class EngineMetrics:
    """Counts and sizes of an engine.

    Attributes:
        steps: Steps that were committed.
        rolled_back_steps: Steps that were dropped after a failure.
        deferred_rows: Rows that committed steps put off for lack of capacity.
        residents: Requests that hold cache.
        free_blocks: Blocks that no request holds.
        num_blocks: Blocks of the pool.
        pool_tokens: Tokens that the pool can hold.
        pool_bytes: Bytes of the pages of all layers.
    """

    steps: int
    rolled_back_steps: int
    deferred_rows: int
    residents: int
    free_blocks: int
    num_blocks: int
    pool_tokens: int
    pool_bytes: int


class Engine:
    """Serves requests over one model by continuous batching; owned by the thread that made it."""

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        """Allocates the pool.

        Args:
            model: What `load_model` returned.
            config: Sizes and limits; None takes the defaults.

        Raises:
            TypeError: `model` is no Model or `config` no EngineConfig.
        """
        if not isinstance(model, Model):
            raise TypeError(f"the model is {model!r}; give what load_model returned")
        if not isinstance(config, EngineConfig | None):
            raise TypeError(f"the config is {config!r}; give an EngineConfig or nothing")
        self._model = model
        self._owner = threading.get_ident()
        self._handles: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        self._abandoned: collections.deque[int] = collections.deque()
        self._steps = 0
        self._rolled_back = 0
        self._state: EngineState | None = init_state(model, EngineConfig() if config is None else config)

    @property
    def model(self) -> Model:
        """The model that the engine serves."""
        return self._model

    @property
    def state(self) -> EngineState:
        """The current state; the engine's next commit spends it."""
        if self._state is None:
            raise EngineError("the engine is closed; make a new one")
        return self._state

    @property
    def metrics(self) -> EngineMetrics:
        """Counts and sizes as of now."""
        control = self.state.control
        return EngineMetrics(
            steps=self._steps,
            rolled_back_steps=self._rolled_back,
            deferred_rows=int(control.counters[DEFERRALS]),
            residents=int((control.requests.place >= 0).sum()),
            free_blocks=len(control.free_blocks),
            num_blocks=control.config.num_blocks,
            pool_tokens=control.config.num_blocks * control.config.block_size,
            pool_bytes=sum(pages.nbytes for pages in self.state.store.pages),
        )

    def create_request(self, options: RequestOptions | None = None) -> Request:
        """Makes a request; see `jaxengine.create_request` for what is refused."""
        self._enter()
        with interrupts_deferred():
            self._state, request_id = requests.create_request(self.state, options)
            request = Request(self, request_id)
            self._handles[request_id] = request
            weakref.finalize(request, self._abandoned.append, request_id).atexit = False
        return request

    def run(self, max_events: int = 64) -> list[Event]:
        """Drains retained events, or, with none retained, runs at most one step.

        Args:
            max_events: Most events to return; the rest is retained in order. 0 does nothing.

        Returns:
            The events. An empty list is no end: a step may only have advanced a prefill, so go on while
            `has_pending_requests()`.

        Raises:
            TypeError: `max_events` is no integer.
            ValueError: `max_events` is negative.
            EngineError: The engine is closed, or the call comes from another thread.
        """
        max_events = require_count("max_events", max_events)
        if max_events == 0:
            self._require_owner()
            return []
        self._enter()
        if not self.state.control.events:
            self._step()
        state, records = requests.drain(self.state, max_events)
        events = [event for record in records if (event := self._event(record))]
        self._state = state
        return events

    def has_pending_requests(self) -> bool:
        """Returns True while events are retained or some request is queued or active."""
        self._enter()
        return requests.has_pending_work(self.state)

    def close(self) -> None:
        """Drops the state and its memory; handles stay as closed tombstones. Closing twice is nothing."""
        self._state = None

    def __enter__(self) -> Engine:
        """Returns the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def _require_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise EngineError("the engine belongs to the thread that made it; call it from there")
        self.state  # noqa: B018 - raises if closed

    def _enter(self) -> None:
        """The boundary of every call: checks the owner and reclaims requests whose last handle is gone."""
        self._require_owner()
        while self._abandoned:
            # Taken off only when it is closed, so that a Ctrl-C between the two loses no request.
            self._state = requests.close_request(self.state, self._abandoned[0])
            self._abandoned.popleft()

    def _enter_for(self, request: Request) -> None:
        if self._state is None:
            raise RequestStateError(f"request {request.id} is CLOSED with its engine; make a new engine")
        self._enter()

    def _step(self) -> None:
        plan = plan_step(self.state)
        if plan.outcome == StepOutcome.NO_WORK:
            return
        if plan.outcome == StepOutcome.CAPACITY_DEFERRED:
            self._publish(
                EngineEventFlags.CAPACITY_BLOCKED,
                EngineErrorCode.CAPACITY_DEFERRED,
                f"{plan.deferred} requests wait for blocks or places; "
                "close a finished request to free some, or a live one if none is finished",
            )
            return
        try:
            transaction = execute(self._model, self.state, plan)
        except RetryableStepError as error:
            self._rolled_back += 1
            self._publish(EngineEventFlags.RETRYABLE, EngineErrorCode.RETRYABLE_EXECUTION, str(error))
            self._state = requests.note_failures(self.state, error.request_ids, str(error))
            return
        with interrupts_deferred():
            self._state, _ = commit(self.state, transaction)
            self._steps += 1

    def _publish(self, flags: EngineEventFlags, code: EngineErrorCode, detail: str) -> None:
        event = EventRecord(request_id=0, turn_id=0, flags=flags, error_code=code, detail=detail)
        self._state = requests.publish(self.state, event)

    def _event(self, record: EventRecord) -> Event | None:
        request = self._handles.get(record.request_id)
        if record.request_id and request is None:
            # The handle went away during this call, in a collected cycle for one: its events go with it.
            return None
        return Event(
            request=request,
            turn_id=record.turn_id,
            flags=record.flags,
            token=record.token,
            finish_reason=record.finish_reason,
            error_code=record.error_code,
            detail=record.detail,
            usage=record.usage,
        )


class Request:
    """A handle to one request; dropping the last one closes the request at the engine's next call."""

    def __init__(self, engine: Engine, request_id: int) -> None:
        """Made by `Engine.create_request`."""
        self._engine = engine
        self.id = request_id

    def __repr__(self) -> str:
        return f"Request(id={self.id}, status={self.status.name})"

    def __deepcopy__(self, memo: object) -> Request:
        # A handle is an identity: `dataclasses.asdict(event)` must not copy the engine behind it.
        return self

    def __copy__(self) -> Request:
        return self

    @property
    def status(self) -> RequestStatus:
        """Where the request is in its life; CLOSED once its engine is."""
        if self._engine._state is None:
            return RequestStatus.CLOSED
        return requests.status_of(self._engine.state, self.id)

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
        row = self._row()
        return (
            np.zeros(0, np.int32) if row < 0 else self._engine.state.control.tokens.read(row, 0, self.length)
        )

    def begin_turn(
        self, tokens: Sequence[int] | np.ndarray | jax.Array, options: TurnOptions | None = None
    ) -> int:
        """Queues input and returns the new turn's id; see `jaxengine.begin_turn` for what is refused."""
        self._engine._enter_for(self)
        self._engine._state, turn_id = requests.begin_turn(self._engine.state, self.id, tokens, options)
        return turn_id

    def cancel_turn(self, turn_id: int) -> bool:
        """Ends a live turn between steps; see `jaxengine.cancel_turn`."""
        self._engine._enter_for(self)
        self._engine._state, cancelled = requests.cancel_turn(self._engine.state, self.id, turn_id)
        return cancelled

    def close(self) -> None:
        """Frees the request's blocks and place and drops its undrained events. Closing twice is nothing."""
        if self._engine._state is not None:
            self._engine._enter()
            self._engine._state = requests.close_request(self._engine.state, self.id)

    def _row(self) -> int:
        return -1 if self._engine._state is None else row_of(self._engine.state.control, self.id)

    def _count(self, column: str) -> int:
        row = self._row()
        return 0 if row < 0 else int(getattr(self._engine.state.control.requests, column)[row])
