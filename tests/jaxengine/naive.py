"""The engine over the toy decoder in lists and dicts: what the real one must do, said once more, slowly.

No device, no blocks by name, no values that are shared: tests drive both with the same commands and compare all that
can be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxengine import (
    EngineConfig,
    EngineErrorCode,
    EngineEventFlags,
    EventRecord,
    FinishReason,
    RequestStatus,
    Usage,
)
from jaxengine.toy import CONTEXT, next_token

LIVE = (RequestStatus.QUEUED, RequestStatus.ACTIVE)


@dataclasses.dataclass
class NaiveRequest:
    """One request; `blocks` counts those it holds, `rank` is its place in the order of admission."""

    id: int
    max_session: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    processed: int = 0
    input_end: int = 0
    status: RequestStatus = RequestStatus.CREATED
    turn: int = 0
    submitted: int = 0
    rank: int | None = None
    blocks: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    max_generated: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.processed < self.input_end


@dataclasses.dataclass
class NaiveRow:
    """A request's share of a step."""

    request: NaiveRequest
    count: int
    new_blocks: int


class NaiveEngine:
    """Plain-Python twin of the functional core, for greedy requests."""

    def __init__(self, config: EngineConfig, eos: Sequence[int] = (), max_length: int = CONTEXT) -> None:
        self.config = config
        self.eos = eos
        self.max_length = max_length
        self.requests: dict[int, NaiveRequest] = {}
        self.events: list[EventRecord] = []
        self.last_id = self.last_submission = self.last_rank = self.deferrals = 0

    @property
    def free_blocks(self) -> int:
        return self.config.num_blocks - sum(r.blocks for r in self.requests.values())

    def create(self, max_session: int = 0) -> int:
        self.last_id += 1
        self.requests[self.last_id] = NaiveRequest(self.last_id, max_session or self.max_length)
        return self.last_id

    def may_begin(self, request_id: int, count: int) -> bool:
        request = self.requests[request_id]
        return (
            request.status not in LIVE
            and all(event.request_id != request_id for event in self.events)
            and count > 0
            and len(request.tokens) + count < request.max_session
        )

    def begin(self, request_id: int, tokens: Sequence[int], max_generated: int = 0) -> int:
        request = self.requests[request_id]
        self.last_submission += 1
        request.tokens += tokens
        request.input_end = len(request.tokens)
        request.submitted = self.last_submission
        request.turn += 1
        request.status = RequestStatus.QUEUED
        request.prompt_tokens, request.generated, request.max_generated = len(tokens), 0, max_generated
        return request.turn

    def cancel(self, request_id: int, turn_id: int) -> bool:
        request = self.requests[request_id]
        if request.status not in LIVE or request.turn != turn_id:
            return False
        self._finish(request, FinishReason.CANCELLED)
        return True

    def close(self, request_id: int) -> None:
        self.requests.pop(request_id, None)
        self.events = [event for event in self.events if event.request_id != request_id]

    def drain(self, count: int) -> tuple[EventRecord, ...]:
        drained, self.events = self.events[:count], self.events[count:]
        return tuple(drained)

    def candidates(self) -> list[NaiveRequest]:
        """C1: decodes, then prefills of residents, then waiting requests."""
        live = [r for r in self.requests.values() if r.status in LIVE]
        resident = sorted((r for r in live if r.rank is not None), key=lambda r: r.rank)
        waiting = sorted((r for r in live if r.rank is None), key=lambda r: r.submitted)
        return [r for r in resident if not r.is_prefill] + [r for r in resident if r.is_prefill] + waiting

    def plan(self) -> tuple[list[NaiveRow], list[NaiveRequest], int]:
        """The rows of the next step, the requests that no empty pool could hold, and how many were put off."""
        rows: list[NaiveRow] = []
        hopeless, deferred = [], 0
        free = self.free_blocks
        places = self.config.max_batch_size - sum(r.rank is not None for r in self.requests.values())
        most_rows = min(self.config.max_batch_size, self.config.max_scheduled_tokens)
        for request in self.candidates():
            needed = -(-len(request.tokens) // self.config.block_size)
            if needed > self.config.num_blocks:
                hopeless.append(request)
            elif len(rows) == most_rows:
                continue
            elif needed - request.blocks > free or (request.rank is None and places == 0):
                deferred += 1
            else:
                rows.append(NaiveRow(request, 1, needed - request.blocks))
                free -= needed - request.blocks
                places -= request.rank is None
        budget = self.config.max_scheduled_tokens - len(rows)
        for row in rows:
            if row.request.is_prefill:
                remaining = len(row.request.tokens) - row.request.processed
                extra = min(budget, min(remaining, self.config.chunk_size or remaining) - 1)
                row.count += extra
                budget -= extra
        return rows, hopeless, deferred

    def step(self) -> None:
        """Runs one step, if there is anything to run or to fail."""
        rows, hopeless, deferred = self.plan()
        if rows or hopeless:
            self.deferrals += deferred
        for row in rows:
            request = row.request
            if request.rank is None:
                self.last_rank += 1
                request.rank = self.last_rank
            request.blocks += row.new_blocks
            request.processed += row.count
            request.status = RequestStatus.ACTIVE
        for row in rows:
            if row.request.processed == len(row.request.tokens):
                self._sample(row.request)
        for request in hopeless:
            self._finish(request, FinishReason.FAILED)

    def _sample(self, request: NaiveRequest) -> None:
        token = next_token(request.tokens)
        reason = FinishReason.NONE
        if token in self.eos:
            reason = FinishReason.EOS
        else:
            request.tokens.append(token)
            request.generated += 1
            if request.generated == request.max_generated:
                reason = FinishReason.MAX_GENERATED_TOKENS
            elif len(request.tokens) == request.max_session:
                reason = FinishReason.MAX_SESSION_TOKENS
        flags = EngineEventFlags.NONE if token in self.eos else EngineEventFlags.TOKEN
        if reason:
            flags |= EngineEventFlags.TURN_FINISHED
            request.status = RequestStatus.TURN_COMPLETE
        self._publish(request, flags, -1 if token in self.eos else token, reason)

    def _finish(self, request: NaiveRequest, reason: FinishReason) -> None:
        request.status = RequestStatus.TURN_COMPLETE
        failed = reason == FinishReason.FAILED
        flags = EngineEventFlags.TURN_FINISHED | (
            EngineEventFlags.FAILED if failed else EngineEventFlags.NONE
        )
        code = EngineErrorCode.REQUEST_UNSERVICEABLE if failed else EngineErrorCode.NONE
        self._publish(request, flags, -1, reason, code)

    def _publish(
        self,
        request: NaiveRequest,
        flags: EngineEventFlags,
        token: int,
        reason: FinishReason,
        code: EngineErrorCode = EngineErrorCode.NONE,
    ) -> None:
        usage = Usage(request.prompt_tokens, request.generated)
        self.events.append(EventRecord(request.id, request.turn, flags, token, reason, code, "", usage))
