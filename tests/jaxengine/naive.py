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


@dataclasses.dataclass(eq=False)
class NaiveRequest:
    """One request; `blocks` counts those it holds, `rank` is its place in the order of admission.

    `served`, `queued` and `settled` are counts of steps: when it last ran or was queued, when it began to wait for its
    place, and when it had its first token there.
    """

    id: int
    max_session: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    processed: int = 0
    input_end: int = 0
    status: RequestStatus = RequestStatus.CREATED
    turn: int = 0
    submitted: int = 0
    served: int = 0
    queued: int = 0
    settled: int | None = None
    rank: int | None = None
    blocks: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    max_generated: int = 0
    failures: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_prefill(self) -> bool:
        return self.processed < self.input_end


@dataclasses.dataclass
class NaiveRow:
    """A request's share of a step; `drafts` come on top of `count`."""

    request: NaiveRequest
    count: int
    new_blocks: int
    drafts: int = 0


@dataclasses.dataclass
class NaivePlan:
    """What a step does: its rows, who fails, who gives its blocks back, and how many were put off."""

    rows: list[NaiveRow]
    hopeless: list[NaiveRequest]
    evicted: list[NaiveRequest]
    deferred: int


class NaiveEngine:
    """Plain-Python twin of the functional core, for greedy requests."""

    def __init__(self, config: EngineConfig, eos: Sequence[int] = (), max_length: int = CONTEXT) -> None:
        self.config = config
        self.eos = eos
        self.max_length = max_length
        self.requests: dict[int, NaiveRequest] = {}
        self.events: list[EventRecord] = []
        self.last_id = self.last_submission = self.last_rank = 0
        self.deferrals = self.steps = self.preemptions = self.drafted = self.accepted = 0
        self.suspects: list[list[int]] = []

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
        request.served = self.steps
        request.turn += 1
        request.status = RequestStatus.QUEUED
        request.prompt_tokens, request.generated, request.max_generated = len(tokens), 0, max_generated
        request.failures, request.drafts = 0, []
        return request.turn

    def most_drafts(self, request_id: int) -> int:
        """M1: what may be proposed, if the request is past its input."""
        request, config = self.requests[request_id], self.config
        left = request.max_session - len(request.tokens)
        if request.max_generated:
            left = min(left, request.max_generated - request.generated)
        most = min(left, config.chunk_size or left, config.max_scheduled_tokens) - 1
        return 0 if config.batching == "static" else most

    def propose(self, request_id: int, drafts: Sequence[int]) -> None:
        self.requests[request_id].drafts = list(drafts)

    def cancel(self, request_id: int, turn_id: int) -> bool:
        request = self.requests[request_id]
        if request.status not in LIVE or request.turn != turn_id:
            return False
        self.finish(request, FinishReason.CANCELLED)
        return True

    def close(self, request_id: int) -> None:
        if self.requests.pop(request_id, None):
            self._acquit([request_id])
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

    def plan(self) -> NaivePlan:
        """What the next step does."""
        bound, free = self.config.fairness_bound, self.free_blocks
        places = self.config.max_batch_size - sum(r.rank is not None for r in self.requests.values())
        most_rows = min(self.config.max_batch_size, self.config.max_scheduled_tokens)

        def needed(r: NaiveRequest) -> int:
            return -(-len(r.tokens) // self.config.block_size)

        hopeless = [r for r in self.candidates() if needed(r) > self.config.num_blocks]
        candidates = [r for r in self.candidates() if r not in hopeless]
        senior = sorted(candidates, key=lambda r: (r.served, r.submitted))
        with_a_place = [r for r in senior if r.rank is None][:places]
        available = free + sum(r.blocks for r in candidates)

        def slack(r: NaiveRequest) -> int:
            return max(bound - (self.steps - r.served), 0)

        def wanted(r: NaiveRequest) -> int:
            return needed(r) - r.blocks

        def reachable(r: NaiveRequest) -> bool:
            return needed(r) <= available and (r.rank is not None or r in with_a_place)

        def claims(r: NaiveRequest) -> bool:
            return reachable(r) and slack(r) <= 1

        def claimed(r: NaiveRequest) -> int:
            return sum(wanted(s) for s in senior[: senior.index(r)] if claims(s)) if r.rank is None else 0

        def pressing(group: list[NaiveRequest]) -> list[NaiveRequest]:
            """The fewest that must go now, if the others follow a full step at a time and nobody may miss the bound."""
            able = [(k, r) for k, r in enumerate(group) if wanted(r) + claimed(r) <= free]
            for count in range(len(able) + 1):
                if all((k - count) // most_rows + 1 <= slack(r) for k, r in able[count:]):
                    break
            return [r for _, r in able[:count]]

        first = pressing([r for r in senior if reachable(r) and r.rank is not None])
        first += [r for r in pressing([r for r in senior if reachable(r)]) if r not in first]
        order = sorted(first[:most_rows], key=senior.index) + first[most_rows:]
        order += [r for r in candidates if r not in order]
        for group in self.suspects:
            able = [r for r in order if r.id in group and reachable(r) and wanted(r) + claimed(r) <= free]
            if able:
                order = able
                break

        rows: list[NaiveRow] = []
        deferred, left_free, left_places = 0, free, places
        for request in order:
            if len(rows) == most_rows:
                break
            unclaimed = free - sum(row.new_blocks for row in rows if not claims(row.request))
            fits = wanted(request) <= left_free
            if request.rank is None:
                fits = fits and left_places > 0 and wanted(request) + claimed(request) <= unclaimed
            if not fits:
                deferred += 1
            else:
                rows.append(NaiveRow(request, 1, wanted(request)))
                left_free -= wanted(request)
                left_places -= request.rank is None

        evicted: list[NaiveRequest] = []
        if self.config.preemption == "recompute":
            chosen = {row.request.id: row.new_blocks for row in rows}
            left = [r for r in senior if r.id not in chosen]
            youngest = sorted((r for r in candidates if r.rank is not None), key=lambda r: -r.rank)

            def fewest(victims: list[NaiveRequest], missing: int) -> list[NaiveRequest] | None:
                for count in range(len(victims) + 1):
                    if sum(v.blocks + chosen.get(v.id, 0) for v in victims[:count]) >= missing:
                        return victims[:count]
                return None

            def gives_way(v: NaiveRequest, who: NaiveRequest) -> bool:
                came_later = (v.queued, v.submitted) > (who.served, who.submitted)
                return came_later or (v.settled is not None and self.steps - v.settled >= bound - 1)

            room, spared, nobody_new = left_free, [], False
            for who in left:
                if not claims(who) or who in evicted or (nobody_new and who.rank is None):
                    continue
                spared.append(who)
                victims = [
                    v
                    for v in sorted(youngest, key=lambda v: slack(v) <= 1)
                    if gives_way(v, who)
                    and v not in evicted
                    and v not in spared
                    # One that is served at the last moment is not put off.
                    and (v in left or slack(v) > 1 or v.served == self.steps)
                ]
                found = fewest(victims, wanted(who) - room)
                if found is None:
                    nobody_new = True
                else:
                    evicted += found
                    room += sum(v.blocks + chosen.get(v.id, 0) for v in found) - wanted(who)
            if not evicted and not rows:
                options = [
                    fewest([v for v in youngest if v is not r], wanted(r) - room) for r in reversed(youngest)
                ]
                newcomers = [r for r in left if r.rank is None]
                if all(option is None for option in options) and newcomers:
                    least = min(wanted(r) + claimed(r) for r in newcomers)
                    found = fewest(youngest, least - room)
                    options.append(found if found is None else found or youngest[:1])
                evicted = min((option for option in options if option is not None), key=len, default=[])
            rows = [row for row in rows if row.request not in evicted]
        budget = self.config.max_scheduled_tokens - len(rows)
        # C3, M4: drafts take what a token for each row leaves, then prefills.
        runs = [row.request for row in rows]
        spare = free - sum(row.new_blocks for row in rows)
        spare = max(spare - sum(wanted(r) for r in candidates if claims(r) and r not in runs), 0)
        for row in rows:
            request, size = row.request, self.config.block_size
            if request.drafts and not request.is_prefill:
                has = request.blocks + row.new_blocks
                most = min(len(request.drafts), budget, (self.config.chunk_size or CONTEXT) - 1)
                row.drafts = min(most, (has + spare) * size - len(request.tokens))
                extra = max(-(-(len(request.tokens) + row.drafts) // size) - has, 0)
                row.new_blocks += extra
                budget, spare = budget - row.drafts, spare - extra
        for row in rows:
            if row.request.is_prefill:
                remaining = len(row.request.tokens) - row.request.processed
                extra = min(budget, min(remaining, self.config.chunk_size or remaining) - 1)
                row.count += extra
                budget -= extra
        return NaivePlan(rows, hopeless, evicted, deferred)

    def step(self) -> None:
        """Runs one step, if there is anything to run or to fail."""
        self.commit(self.plan())

    def commit(self, plan: NaivePlan) -> None:
        """Does what a plan says."""
        rows, hopeless = plan.rows, plan.hopeless
        if rows or hopeless or plan.evicted:
            self.deferrals += plan.deferred
        self.steps += bool(rows)
        for row in rows:
            request = row.request
            if request.rank is None:
                self.last_rank += 1
                request.rank, request.queued, request.settled = self.last_rank, request.served, None
            request.served = self.steps
            request.blocks += row.new_blocks
            request.processed += row.count
            request.status = RequestStatus.ACTIVE
            request.failures = 0
        self._acquit([row.request.id for row in rows])
        for request in plan.evicted:
            request.status, request.rank = RequestStatus.QUEUED, None
            request.blocks = request.processed = 0
            request.input_end = len(request.tokens)
        self.preemptions += len(plan.evicted)
        for row in rows:
            if row.request.processed == len(row.request.tokens):
                row.request.settled = self.steps if row.request.settled is None else row.request.settled
                self._choose(row)
        for request in hopeless:
            self.finish(request, FinishReason.FAILED, EngineErrorCode.REQUEST_UNSERVICEABLE)

    def _choose(self, row: NaiveRow) -> None:
        """M2, M5: one token, and another for each draft that is the token chosen before it."""
        request, drafts = row.request, row.request.drafts[: row.drafts]
        request.drafts = []
        self.drafted += row.drafts
        before = len(request.tokens)
        self._sample(request)
        while drafts and request.status in LIVE and drafts.pop(0) == request.tokens[-1]:
            self.accepted += 1
            request.processed += 1
            self._sample(request)
        if row.drafts:
            request.blocks = -(-max(request.processed, before) // self.config.block_size)

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

    def finish(
        self, request: NaiveRequest, reason: FinishReason, code: EngineErrorCode = EngineErrorCode.NONE
    ) -> None:
        """Ends a turn; a code says that it failed."""
        self._acquit([request.id])
        request.status, request.drafts = RequestStatus.TURN_COMPLETE, []
        flags = EngineEventFlags.TURN_FINISHED
        if code:
            flags |= EngineEventFlags.FAILED
        self._publish(request, flags, -1, reason, code)

    def _acquit(self, ids: list[int]) -> None:
        """These are no suspects any more."""
        groups = [[member for member in group if member not in ids] for group in self.suspects]
        self.suspects = [group for group in groups if group]

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
