"""The imperative shell: an engine that holds the current state, and sees to it that one thread owns it.

Every decision is made by the functional core; this file keeps the newest state, turns records into events with handles,
and closes the requests whose last handle is gone.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from jaxengine import drafts, failures, requests
from jaxengine.checks import require_count
from jaxengine.config import EngineConfig, RequestOptions, TurnOptions
from jaxengine.errors import ContractError, EngineError, StaleTransactionError, StepError
from jaxengine.events import EventRecord
from jaxengine.guidance import GuidanceError
from jaxengine.handles import Event, EventStream, Request
from jaxengine.interrupts import interrupts_deferred
from jaxengine.invariants import check_invariants
from jaxengine.metrics import EngineMetrics, metrics_of
from jaxengine.model import Model
from jaxengine.planning import StepOutcome, StepPlan, plan_step
from jaxengine.state import (
    EngineState,
    RequestStatus,
    facts_of,
    init_state,
    require_healthy,
    require_unspent,
)
from jaxengine.transaction import commit, execute

P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """Serves requests over one model by continuous batching; owned by the thread that made it."""

    def __init__(self, model: Model, config: EngineConfig | None = None) -> None:
        """Allocates the pool.

        Args:
            model: What `load_model` returned.
            config: Sizes and limits; None takes the defaults.

        Raises:
            TypeError: `model` is no Model or `config` no EngineConfig.
            ValueError: The free memory is too small for the pool, of the given size or of any; or `config.backend` is a
                kernel that does not take some layer.
        """
        self._model = model
        self._owner = threading.get_ident()
        self._handles: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        self._abandoned: collections.deque[int] = collections.deque()
        self._cause: BaseException | None = None
        self._closed = False
        self._state: EngineState | None = init_state(model, EngineConfig() if config is None else config)

    @property
    def model(self) -> Model:
        """The model that the engine serves."""
        return self._model

    @property
    def has_state(self) -> bool:
        """Whether the engine is neither closed nor detached."""
        return self._state is not None

    @property
    def state(self) -> EngineState:
        """The current state; the engine's next commit spends it."""
        if self._state is None:
            remedy = "make a new one" if self._closed else "attach a state"
            raise EngineError(f"the engine is {'closed' if self._closed else 'detached'}; {remedy}")
        return self._state

    @property
    def metrics(self) -> EngineMetrics:
        """Counts and sizes as of now."""
        return metrics_of(self.state)

    def create_request(self, options: RequestOptions | None = None) -> Request:
        """Makes a request; see `jaxengine.create_request` for what is refused, and `prepare` for its grammar."""
        self.prepare(options)
        with interrupts_deferred():
            return self._hand_out(self.apply(requests.create_request, options))

    def prepare(self, options: RequestOptions | TurnOptions | None) -> None:
        """Compiles a grammar before a request or a turn has it, so that no step waits for that.

        What fails for the moment is left to the first step that needs the grammar, which may be tried again.

        Raises:
            ValueError: No turn can begin under the grammar with this model's tokenizer.
        """
        self._enter()
        if not isinstance(options, RequestOptions | TurnOptions) or options.grammar is None:
            return
        guides = self._model.guides
        # Without a tokenizer the core refuses every grammar.
        if guides is None:
            return
        try:
            guides.prepare(options.grammar)
        except GuidanceError as error:
            raise ValueError(f"the grammar can't be used with this model: {error}") from error
        except Exception:
            return

    def run(self, max_events: int = 64) -> list[Event]:
        """Drains retained events, or, with none retained, runs at most one step.

        Args:
            max_events: Most events to return; the rest is retained in order. 0 does nothing.

        Returns:
            The events. An empty list is no end: a step may only have advanced a prefill, so go on while
            `has_pending_requests()`.

        Raises:
            TypeError: `max_events` is no integer.
            ValueError: `max_events` is negative, or the policy returned no order of the requests.
            EngineError: The engine is closed, the call comes from another thread, or a failure has ended the engine's
                work and every event is drained.
            MemoryError: Memory ran out while the step was planned; the engine is as it was.
        """
        max_events = require_count("max_events", max_events)
        if max_events == 0:
            self._require_owner()
            self._require_healthy()
            return []
        self._enter()
        if not self.state.control.events:
            self._step()
        return self._drain(max_events)

    def max_draft_tokens_per_proposal(self) -> int:
        """Returns how many tokens `Request.set_draft_tokens` takes at most, whatever a request's own limits."""
        return drafts.max_draft_tokens_per_proposal(self.state)

    def stream(self) -> EventStream:
        """Iterates over the events of all requests, in a `for` or an `async for`, until nothing is pending."""
        return EventStream(lambda: self.run(1) if self.has_state and self.has_pending_requests() else None)

    def has_pending_requests(self) -> bool:
        """Returns True while events are retained or some request is queued or active."""
        self._enter()
        return requests.has_pending_work(self.state)

    def detach(self) -> EngineState:
        """Hands the state over and leaves the engine without one; its handles become closed tombstones for good.

        Raises:
            EngineError: The engine is closed or detached, or the call comes from another thread.
        """
        self._enter()
        state = self.state
        self._forget()
        self._state = None
        return state

    def attach(self, state: EngineState) -> dict[int, Request]:
        """Goes on from a state that was detached or made by the functional core.

        Args:
            state: An unspent state of this engine's model.

        Returns:
            A handle for each of its requests by id; a request whose handle is dropped is closed.

        Raises:
            TypeError: `state` is no EngineState.
            EngineError: The engine is closed, still has a state, or the call comes from another thread.
            SpentStateError: A commit has taken the state over.
            ValueError: The state was made for another model, or for other settings of its folder.
        """
        self._require_thread()
        if self._closed or self._state is not None:
            remedy = "make a new one" if self._closed else "detach it first"
            raise EngineError(f"the engine {'is closed' if self._closed else 'has a state'}; {remedy}")
        require_unspent(state)
        if state.control.facts != facts_of(self._model):
            raise ValueError(
                "the state was made for another model, or one of other settings; attach it to an engine of that model"
            )
        with interrupts_deferred():
            self._state = state
            return {
                request_id: self._hand_out(request_id) for request_id in state.control.requests.id.tolist()
            }

    def close(self) -> None:
        """Drops the state and its memory; handles stay as closed tombstones. Closing twice is nothing.

        Raises:
            EngineError: The call comes from another thread.
        """
        self._require_thread()
        self._closed = True
        self._state = None
        self._forget()

    def __enter__(self) -> Engine:
        """Returns the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def apply(
        self,
        transition: Callable[Concatenate[EngineState, P], tuple[EngineState, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Takes the state through a function of the core, on the owner's thread, and returns what else it returned."""
        self._enter()
        state, result = transition(self.state, *args, **kwargs)
        require_unspent(state)
        self._state = state
        return result

    def state_of(self, request: Request) -> EngineState | None:
        """The current state if `request` is a handle to something in it, else None; any thread may ask."""
        # Read once: the owner may take the state away in the meantime.
        state = self._state
        return state if self._handles.get(request.id) is request else None

    def pull(self, request: Request) -> list[Event] | None:
        """At most one event of `request` or of the engine as a whole, if need be after a step; None at its end.

        Its end is when its turn is over and its own events are drained: what the engine says later is for others.
        """
        if self.state_of(request) is None:
            return None
        self._enter()
        live = request.status in (RequestStatus.QUEUED, RequestStatus.ACTIVE)
        if not live and not requests.has_undrained(self.state, request.id):
            return None
        events = self._drain(1, request.id)
        if events or not live:
            return events
        self._step()
        return self._drain(1, request.id)

    def _drain(self, count: int, request_id: int | None = None) -> list[Event]:
        state, records = requests.drain(self.state, count, request_id)
        events = [event for record in records if (event := self._event(record))]
        self._state = state
        return events

    def _require_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise EngineError("the engine belongs to the thread that made it; call it from there")

    def _require_owner(self) -> None:
        self._require_thread()
        self.state  # noqa: B018 - raises if there is none

    def _require_healthy(self) -> None:
        try:
            require_healthy(self.state.control)
        except EngineError as error:
            raise error from self._cause

    def _enter(self) -> None:
        """The boundary of every call: checks the owner and reclaims requests whose last handle is gone."""
        self._require_owner()
        self._reclaim()

    def _reclaim(self) -> None:
        while self._abandoned:
            # Taken off only when it is closed, so that a Ctrl-C between the two loses no request.
            self._state = requests.close_request(self.state, self._abandoned[0])
            self._abandoned.popleft()

    def _forget(self) -> None:
        """Handles and the failure of the state that was are no concern of a later one."""
        self._cause = None
        self._handles = weakref.WeakValueDictionary()
        self._abandoned = collections.deque()

    def _hand_out(self, request_id: int) -> Request:
        request = Request(self, request_id)
        self._handles[request_id] = request
        weakref.finalize(request, self._abandoned.append, request_id).atexit = False
        return request

    def _step(self) -> None:
        self._require_healthy()
        plan = self._try_step()
        if plan is not None and len(plan.index) == 0 and self.state.control.config.batching == "static":
            # The old batch was recycled, which runs nothing: the new one can start at once.
            self._try_step()

    def _try_step(self) -> StepPlan | None:
        """One step, or the report of why there is none; returns the plan if it was committed."""
        plan: StepPlan | None = None
        planned = self.state
        with contextlib.ExitStack() as stack:
            try:
                plan = plan_step(self.state)
                if plan.outcome == StepOutcome.NO_WORK:
                    return None
                if plan.outcome == StepOutcome.CAPACITY_DEFERRED:
                    self._state = failures.after_blocked(self.state, plan)
                    return None
                transaction = execute(self._model, self.state, plan)
                # Until what the commit came to is recorded: a Ctrl-C in between would hide that it lost the store.
                stack.enter_context(interrupts_deferred())
                self._state, _ = commit(self.state, transaction)
            except StepError as error:
                self._fail(plan, error)
            except (ValueError, StaleTransactionError) as error:
                if plan is None:
                    raise
                if self.state is not planned:
                    # A policy or a signal handler has called the engine meanwhile: the next run plans again.
                    return None
                refused = ContractError(f"the engine's own plan was refused: {error}")
                refused.__cause__ = error
                self._fail(plan, refused)
            else:
                if self.state.control.config.check_invariants:
                    check_invariants(self.state)
                return plan
        return None

    def _fail(self, plan: StepPlan | None, error: StepError) -> None:
        rows: list[Any] = [] if plan is None else plan.request_ids.tolist()
        self._state = failures.after_failure(self.state, rows, error)
        if self._state.control.failure is not None:
            # Kept only then, and without what its traceback holds on to.
            error.add_note("".join(traceback.format_exception(error)))
            _drop_frames(error)
            self._cause = error

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
            text=record.text,
            stop=record.stop,
            logprobs=record.logprobs,
            prompt_logprobs=record.prompt_logprobs,
        )


def _drop_frames(error: BaseException | None) -> None:
    """Takes the traceback off an error and those behind it: frames hold every caller's variables, handles for one."""
    if error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        _drop_frames(error.__cause__)
        _drop_frames(error.__context__)
