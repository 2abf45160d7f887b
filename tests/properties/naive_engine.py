"""What `Engine` adds to the plain-Python twin: one step a run, what a failure costs, requests whose handle is gone."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine import (
    EngineConfig,
    EngineError,
    EngineErrorCode,
    EngineEventFlags,
    EventRecord,
    FinishReason,
    RequestStateError,
    RetryableStepError,
    Stage,
)
from jaxengine.faults import Fault
from jaxengine.toy import ALL_MASKED, LETTERS, NAN, VOCAB
from tests.jaxengine.naive import LIVE, NaiveEngine, NaivePlan, NaiveRequest

OF_ROWS = (
    Stage.CHECKPOINT,
    Stage.PACK,
    Stage.EXECUTE,
    Stage.RESERVE,
    Stage.MASKS,
    Stage.LOGITS,
    Stage.SAMPLE,
)
OF_A_COMMIT = (Stage.VALIDATE, Stage.BOOKKEEPING, Stage.EVENTS, Stage.PUBLISH)


class NaiveServer(NaiveEngine):
    """Plain-Python twin of `Engine`; `armed` holds faults, `abandoned` the ids of dropped handles in their order."""

    def __init__(self, config: EngineConfig, eos: Sequence[int] = ()) -> None:
        super().__init__(config, eos)
        self.failed_steps = 0
        self.stopped = False
        self.armed: list[Fault] = []
        self.abandoned: list[int] = []

    @property
    def live(self) -> list[NaiveRequest]:
        return [request for request in self.requests.values() if request.status in LIVE]

    @property
    def has_pending(self) -> bool:
        return bool(self.events or self.live)

    @property
    def is_blocked(self) -> bool:
        """Whether nobody can go on until the caller closes something."""
        plan = self.plan()
        return bool(plan.deferred) and not (plan.rows or plan.evicted or plan.hopeless)

    def enter(self) -> None:
        """The boundary of a call: A11."""
        for request_id in self.abandoned:
            self.close(request_id)
        self.abandoned = []

    def refusal(self, request_id: int, tokens: Sequence[int]) -> type[Exception] | None:
        """What `begin_turn` raises."""
        if self.stopped:
            return EngineError
        request = self.requests.get(request_id)
        if request is None or request.status in LIVE:
            return RequestStateError
        if any(event.request_id == request_id for event in self.events):
            return RequestStateError
        known = all(0 <= token <= max(LETTERS, NAN, ALL_MASKED) for token in tokens)
        return None if known and self.may_begin(request_id, len(tokens)) else ValueError

    def draft_refusal(self, request_id: int, drafts: Sequence[int]) -> type[Exception] | None:
        """What `set_draft_tokens` raises."""
        request = self.requests.get(request_id)
        if self.stopped:
            return EngineError
        if request is None or request.status not in LIVE or request.is_prefill:
            return RequestStateError
        known = all(0 <= token < VOCAB for token in drafts)
        return None if known and len(drafts) <= max(self.most_drafts(request_id), 0) else ValueError

    def run(self, max_events: int) -> tuple[EventRecord, ...]:
        """B1; raises what `Engine.run` raises."""
        if max_events:
            self.enter()
        if self.stopped and not (max_events and self.events):
            raise EngineError
        if max_events and not self.events:
            self.attempt()
        return self.drain(max_events)

    def pull(self, request_id: int) -> tuple[EventRecord, ...] | None:
        """One event of a request or of the engine as a whole, as its stream asks for them."""
        self.enter()
        request = self.requests.get(request_id)
        live = request is not None and request.status in LIVE
        if not live and all(event.request_id != request_id for event in self.events):
            return None
        if live and self._first_of(request_id) is None:
            self.attempt()
        first = self._first_of(request_id)
        return () if first is None else (self.events.pop(first),)

    def _first_of(self, request_id: int) -> int | None:
        return next((i for i, event in enumerate(self.events) if event.request_id in (request_id, 0)), None)

    def attempt(self) -> None:
        """A step, or what its failure costs."""
        if error := self._fault(Stage.PLAN):
            if not isinstance(error, RetryableStepError):
                raise type(error)
            self._fail(Stage.PLAN, [], error)
            return
        plan = self.plan()
        ids = [row.request.id for row in plan.rows]
        if not ids and not plan.evicted and not plan.hopeless:
            if plan.deferred:
                self._announce(EngineEventFlags.CAPACITY_BLOCKED, EngineErrorCode.CAPACITY_DEFERRED)
            return
        for stage in (*(OF_ROWS if ids else ()), *OF_A_COMMIT):
            bad = self._without_logits(plan) if stage is Stage.SAMPLE else ()
            if bad or (error := self._fault(stage)):
                self._fail(stage, ids, RetryableStepError("", bad) if bad else error)
                return
        self.commit(plan)

    def _without_logits(self, plan: NaivePlan) -> tuple[int, ...]:
        """F7: requests whose last token leaves no finite logits to choose the next one from."""
        return tuple(
            row.request.id
            for row in plan.rows
            if row.request.processed + row.count == len(row.request.tokens)
            and row.request.tokens[-1] in (NAN, ALL_MASKED)
        )

    def _fault(self, stage: Stage) -> Exception | None:
        """What is raised at a stage."""
        for fault in self.armed:
            if fault.stage is stage and not fault.fired:
                if fault.skip == 0:
                    fault.fired = True
                    return fault.error
                fault.skip -= 1
        return None

    def _fail(self, stage: Stage, ids: list[int], error: Exception) -> None:
        self.failed_steps += 1
        if stage is Stage.PUBLISH:
            self._stop(EngineErrorCode.ENGINE_EXECUTION_FAILURE)
        elif isinstance(error, RetryableStepError):
            self._announce(EngineEventFlags.RETRYABLE, EngineErrorCode.RETRYABLE_EXECUTION)
            for request in map(self.requests.__getitem__, error.request_ids):
                request.failures += 1
                if request.failures > self.config.max_row_retries:
                    self.finish(request, FinishReason.FAILED, EngineErrorCode.RETRYABLE_EXECUTION)
        elif isinstance(error, MemoryError):
            self._announce(EngineEventFlags.CAPACITY_BLOCKED, EngineErrorCode.EXECUTION_CAPACITY_EXCEEDED)
        elif stage is Stage.RESERVE:
            self._stop(EngineErrorCode.ENGINE_CONTRACT_FAILURE)
        elif self.config.failure_policy == "isolate" and (ids or [] not in self.suspects):
            self._announce(EngineEventFlags.RETRYABLE, EngineErrorCode.RETRYABLE_EXECUTION)
            self._suspect(ids)
        else:
            self._stop(EngineErrorCode.ENGINE_EXECUTION_FAILURE)

    def _suspect(self, ids: list[int]) -> None:
        """F9: once more as it was, then in halves, then whoever fails alone ends."""
        if not ids or not self.suspects or any(member not in self.suspects[0] for member in ids):
            self.suspects.insert(0, ids)
        elif len(ids) == 1:
            self.finish(self.requests[ids[0]], FinishReason.FAILED, EngineErrorCode.ENGINE_EXECUTION_FAILURE)
        else:
            self.suspects[:1] = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]

    def _stop(self, code: EngineErrorCode) -> None:
        """F4: every live turn ends once; with none, the engine as a whole says so."""
        if not self.live:
            self._announce(EngineEventFlags.FAILED, code)
        for request in self.live:
            self.finish(request, FinishReason.FAILED, code)
        self.stopped = True
        self.suspects = []

    def _announce(self, flags: EngineEventFlags, code: EngineErrorCode) -> None:
        self.events.append(EventRecord(0, 0, flags, error_code=code))
