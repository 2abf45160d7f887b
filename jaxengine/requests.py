"""The life of a request: each call of a user is a pure function from a state to a state.

A request is CREATED, takes turns (QUEUED, ACTIVE, TURN_COMPLETE) and is closed. `length` counts its tokens, `processed`
those whose keys and values are committed; what lies between is still to be run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from jaxengine import blocks
from jaxengine.carried import Carried
from jaxengine.checks import require_count
from jaxengine.config import RequestOptions, TurnOptions
from jaxengine.errors import RequestStateError
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason, Usage
from jaxengine.sampling_params import warn_of_greedy_folder
from jaxengine.state import (
    COLUMN_DTYPES,
    REQUEST_IDS,
    STEPS,
    SUBMISSIONS,
    Control,
    EngineState,
    RequestStatus,
    replace_rows,
    require_healthy,
    require_unspent,
    row_of,
    rows_of,
)
from jaxengine.turns import turn_columns, turn_of

if TYPE_CHECKING:
    import jax

LAST_ID = 2**64 - 1

Options = TypeVar("Options", RequestOptions, TurnOptions)


def create_request(state: EngineState, options: RequestOptions | None = None) -> tuple[EngineState, int]:
    """Adds a request with no tokens.

    Args:
        state: The state; still usable afterwards.
        options: Its settings; None takes the model folder's.

    Returns:
        The new state and the request's id, which is never used again.

    Raises:
        ValueError: The session limit is above the model's, the folder asks for beams, several sequences or a batch, or
            a sampling setting that is left to the folder is out of range there.
        TypeError: `options` is no RequestOptions.
        EngineError: A failure has ended the engine's work.
    """
    require_unspent(state)
    require_healthy(state.control)
    options = _require_options(options, RequestOptions)
    control = state.control
    facts = control.facts
    search = facts.search_settings
    for name in ("num_beams", "num_return_sequences", "batch_size"):
        if search.get(name, 1) != 1:
            raise ValueError(
                f"search.{name} of the model folder is {search[name]}; a request is one sequence, so set it to 1"
            )
    limit = options.max_session_tokens or facts.max_length
    if limit > facts.max_length:
        raise ValueError(
            f"RequestOptions.max_session_tokens is {limit}; "
            f"this model allows at most {facts.max_length} tokens a session"
        )
    request_id = int(control.counters[REQUEST_IDS]) + 1
    turn_of(control, options.sampling, options.grammar, (0, 0))
    warn_of_greedy_folder(options.sampling, search)
    values = dict.fromkeys(COLUMN_DTYPES, 0) | {
        "id": request_id,
        "stamp": _digest(
            np.uint64(0), b"create", (limit, options.sampling, options.grammar, options.proposer)
        ),
        "place": -1,
        "order": -1,
        "max_session": limit,
        "carried": Carried(dataclasses.replace(options.sampling), options.grammar, options.proposer),
    }
    columns = {
        name: np.append(getattr(control.requests, name), np.asarray(values[name], dtype))
        for name, dtype in COLUMN_DTYPES.items()
    }
    counters = control.counters.copy()
    counters[REQUEST_IDS] = request_id
    control = control.replace(  # type: ignore[attr-defined]
        requests=control.requests.replace(**columns),  # type: ignore[attr-defined]
        tokens=control.tokens.add_row(),
        blocks=control.blocks.add_row(),
        counters=counters,
    )
    return state.replace(control=control), request_id  # type: ignore[attr-defined]


def begin_turn(
    state: EngineState,
    request_id: int,
    tokens: Sequence[int] | np.ndarray | jax.Array,
    options: TurnOptions | None = None,
) -> tuple[EngineState, int]:
    """Queues input for a request and starts its next turn.

    Args:
        state: The state; still usable afterwards.
        request_id: A request that is CREATED or TURN_COMPLETE.
        tokens: At least one token id, each inside the vocabulary.
        options: The turn's settings.

    Returns:
        The new state and the turn's id, one above the request's last.

    Raises:
        RequestStateError: The request is queued, active or closed, has events that were not drained, or has shared or
            lost its static batch.
        EngineError: A failure has ended the engine's work.
        ValueError: No tokens, a token outside the vocabulary, or no room for one generated token.
        TypeError: `options` is no TurnOptions.
        OverflowError: The request's turn ids are used up.
    """
    require_unspent(state)
    require_healthy(state.control)
    options = _require_options(options, TurnOptions)
    control = state.control
    row = require_row(control, request_id)
    status = RequestStatus(control.requests.status[row])
    if status not in (RequestStatus.CREATED, RequestStatus.TURN_COMPLETE):
        raise RequestStateError(
            f"request {request_id} is {status.name}; begin a turn once its current one has finished"
        )
    if has_undrained(state, request_id):
        raise RequestStateError(
            f"request {request_id} has events that were not drained; drain them before the next turn"
        )
    values = require_token_ids(tokens, control.facts.vocab_size)
    if len(values) == 0:
        raise ValueError("the turn has no tokens; give at least one")
    length = int(control.requests.length[row])
    limit = int(control.requests.max_session[row])
    if length + len(values) >= limit:
        raise ValueError(
            f"request {request_id} would hold {length + len(values)} tokens of at most {limit}; "
            "leave room for at least one generated token"
        )
    _require_batch(control, row)
    carried: Carried = control.requests.carried[row]
    settings = turn_of(
        control,
        options.sampling or carried.own,
        options.grammar or carried.own_grammar,
        (length, length + len(values)),
    )
    if options.sampling is not None:
        warn_of_greedy_folder(options.sampling, control.facts.search_settings)
    turn = int(control.requests.turn[row])
    if turn == LAST_ID:
        raise OverflowError(f"request {request_id} has used every turn id; create a new request")
    counters = control.counters.copy()
    counters[SUBMISSIONS] += 1
    control = replace_rows(
        control.replace(tokens=control.tokens.extend(row, values), counters=counters),  # type: ignore[attr-defined]
        row,
        status=RequestStatus.QUEUED,
        submitted=counters[SUBMISSIONS],
        served=counters[STEPS],
        stamp=next_stamp(control, row, b"begin", values.tobytes(), options),
        length=length + len(values),
        input_end=length + len(values),
        turn=np.uint64(turn + 1),
        prompt_tokens=len(values),
        generated=0,
        max_generated=options.max_generated_tokens or 0,
        failures=0,
        **turn_columns(control, request_id, carried, settings),
    )
    return state.replace(control=control), turn + 1  # type: ignore[attr-defined]


def cancel_turn(state: EngineState, request_id: int, turn_id: int) -> tuple[EngineState, bool]:
    """Ends a queued or active turn between steps; committed state is kept and one terminal event is published.

    Returns:
        The new state and True, or the same state and False if the turn is unknown, stale or finished.

    Raises:
        RequestStateError: The request has had no turn yet, or is closed.
    """
    require_unspent(state)
    control = state.control
    row = require_row(control, request_id)
    status = control.requests.status[row]
    if status == RequestStatus.CREATED:
        raise RequestStateError(f"request {request_id} has had no turn yet; there is nothing to cancel")
    live = status in (RequestStatus.QUEUED, RequestStatus.ACTIVE)
    if not live or int(control.requests.turn[row]) != turn_id:
        return state, False
    return state.replace(control=finish_turn(control, row, FinishReason.CANCELLED)), True  # type: ignore[attr-defined]


def close_request(state: EngineState, request_id: int) -> EngineState:
    """Ends a request: its undrained events are dropped, its blocks and its place are free. Closing twice is nothing.

    A member of a static batch is never run or reported again, but its block stays taken until the batch is over.

    Raises:
        ValueError: No request ever had this id.
    """
    require_unspent(state)
    control = state.control
    row = _row(control, request_id)
    if row < 0:
        return state
    columns = {name: np.delete(getattr(control.requests, name), row) for name in COLUMN_DTYPES}
    control = control.replace(  # type: ignore[attr-defined]
        requests=control.requests.replace(**columns),  # type: ignore[attr-defined]
        tokens=control.tokens.remove_row(row),
        blocks=control.blocks.remove_row(row),
        free_blocks=free_without(control, np.array([row])),
        events=tuple(event for event in control.events if event.request_id != request_id),
        suspects=without_suspects(control.suspects, [request_id]),
    )
    return state.replace(control=control)  # type: ignore[attr-defined]


def free_without(control: Control, rows: np.ndarray) -> np.ndarray:
    """Returns the free blocks once `rows` have left; a static batch gives back its own all at once, with its last."""
    if control.config.batching == "static":
        left = np.delete(control.requests.place, rows) >= 0
        return control.free_blocks if left.any() else blocks.whole_pool(control.num_blocks)
    held = [control.blocks.read(row, 0, int(control.blocks_held[row])) for row in rows]
    return blocks.release(control.free_blocks, np.concatenate(held), control.num_blocks)


def drain(
    state: EngineState, count: int, request_id: int | None = None
) -> tuple[EngineState, tuple[EventRecord, ...]]:
    """Takes up to `count` events off the front of the state's queue, in order of publication.

    Args:
        state: The state; still usable afterwards.
        count: How many at most.
        request_id: Take only events of this request and those of the engine as a whole; the others stay in order.

    Raises:
        ValueError: `count` is negative, or no request ever had this id.
        TypeError: `count` or `request_id` is no integer.
    """
    require_unspent(state)
    count = require_count("the number of events to drain", count)
    events = state.control.events
    if request_id is None:
        taken, left = events[:count], events[count:]
    else:
        _row(state.control, request_id)
        places = (i for i, event in enumerate(events) if event.request_id in (request_id, 0))
        chosen = list(itertools.islice(places, count))
        taken = tuple(events[i] for i in chosen)
        bounds = itertools.pairwise([-1, *chosen, len(events)])
        left = tuple(itertools.chain.from_iterable(events[i + 1 : j] for i, j in bounds))
    if not taken:
        return state, ()
    owners = np.array([event.request_id for event in taken if event.request_id], np.uint64)
    undrained = state.control.requests.undrained.copy()
    np.subtract.at(undrained, rows_of(state.control, owners), 1)
    columns = state.control.requests.replace(undrained=undrained)  # type: ignore[attr-defined]
    return state.replace(control=state.control.replace(events=left, requests=columns)), taken  # type: ignore[attr-defined]


def publish(state: EngineState, event: EventRecord) -> EngineState:
    """Appends an event to the state's queue."""
    control = state.control.replace(events=(*state.control.events, event))  # type: ignore[attr-defined]
    return state.replace(control=control)  # type: ignore[attr-defined]


def finish_turn(
    control: Control,
    row: int,
    reason: FinishReason,
    error_code: EngineErrorCode = EngineErrorCode.NONE,
    detail: str = "",
) -> Control:
    """Returns `control` with the row's turn complete and its terminal event published."""
    flags = EngineEventFlags.TURN_FINISHED
    if reason == FinishReason.FAILED:
        flags |= EngineEventFlags.FAILED
    event = EventRecord(
        request_id=int(control.requests.id[row]),
        turn_id=int(control.requests.turn[row]),
        flags=flags,
        finish_reason=reason,
        error_code=error_code,
        detail=detail,
        usage=usage_of(control, row),
        text=control.requests.carried[row].unshown,
    )
    stamp = next_stamp(control, row, b"finish", int(reason))
    undrained = control.requests.undrained[row] + 1
    carried = dataclasses.replace(control.requests.carried[row], drafts=())
    control = replace_rows(
        control,
        row,
        status=RequestStatus.TURN_COMPLETE,
        stamp=stamp,
        undrained=undrained,
        num_drafts=0,
        carried=carried,
    )
    suspects = without_suspects(control.suspects, [event.request_id])
    return control.replace(events=(*control.events, event), suspects=suspects)  # type: ignore[attr-defined]


def without_suspects(
    groups: tuple[tuple[int, ...], ...], request_ids: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of `Control.suspects` without these requests, and without those that are empty then."""
    if not groups:
        return groups
    left = (tuple(member for member in group if member not in request_ids) for group in groups)
    return tuple(group for group in left if group)


def usage_of(control: Control, row: int) -> Usage:
    """Returns the counts of the row's current turn."""
    return Usage(int(control.requests.prompt_tokens[row]), int(control.requests.generated[row]))


def status_of(state: EngineState, request_id: int) -> RequestStatus:
    """Returns the status of a request; one that was closed is CLOSED for ever.

    Raises:
        ValueError: No request ever had this id.
    """
    row = _row(state.control, request_id)
    return RequestStatus.CLOSED if row < 0 else RequestStatus(state.control.requests.status[row])


def has_undrained(state: EngineState, request_id: int) -> bool:
    """Returns True while events of the request wait to be drained; the length of the queue is no matter."""
    row = row_of(state.control, request_id)
    return row >= 0 and bool(state.control.requests.undrained[row])


def has_pending_work(state: EngineState) -> bool:
    """Returns True while events wait to be drained or some request is queued or active."""
    status = state.control.requests.status
    live = (status == RequestStatus.QUEUED) | (status == RequestStatus.ACTIVE)
    return bool(state.control.events) or bool(live.any())


def _row(control: Control, request_id: int) -> int:
    """Row of the request, -1 once it is closed; raises if no request ever had the id."""
    if isinstance(request_id, bool) or not isinstance(request_id, int | np.integer):
        raise TypeError(f"request id {request_id!r} is no integer; use an id that create_request returned")
    if not 0 < request_id <= control.counters[REQUEST_IDS]:
        raise ValueError(
            f"there is no request {request_id}; use an id that create_request returned for this state"
        )
    return row_of(control, request_id)


def require_row(control: Control, request_id: int) -> int:
    """Returns the row of a request; raises RequestStateError if it is closed, ValueError if there never was one."""
    row = _row(control, request_id)
    if row < 0:
        raise RequestStateError(f"request {request_id} is CLOSED; create a new request")
    return row


def _require_batch(control: Control, row: int) -> None:
    """Refuses to continue a request of a static batch that had other members, or that has made room for another."""
    requests = control.requests
    if control.config.batching == "dynamic" or requests.admitted[row] == 0:
        return
    request_id = int(requests.id[row])
    if requests.place[row] < 0:
        raise RequestStateError(
            f"request {request_id} has lost its static batch to a later one; create a new request"
        )
    # Each member took one block, those that were closed since have theirs still.
    if control.num_blocks - len(control.free_blocks) > 1:
        raise RequestStateError(
            f"request {request_id} was batched with others, and a static batch continues only if it has one member; "
            "create a new request or use dynamic batching"
        )


def _require_options(options: Options | None, kind: type[Options]) -> Options:
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"the options are {options!r}; give {kind.__name__} or nothing")
    return options


def require_token_ids(
    tokens: Sequence[int] | np.ndarray | jax.Array, vocab_size: int, what: str = "the turn's tokens"
) -> np.ndarray:
    """Returns int32[n] of ids inside the vocabulary; raises ValueError for anything else, naming it as `what`."""
    try:
        values = np.array(tokens)
    except ValueError as error:
        raise ValueError(f"{what} are no flat sequence of integers: {error}") from error
    if values.size == 0:
        return np.zeros(0, np.int32)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{what} are {values.dtype}{list(values.shape)}; give a flat sequence of integers")
    outside = values[(values < 0) | (values >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"token {int(outside[0])} is outside the vocabulary of {vocab_size}; give ids from 0 to {vocab_size - 1}"
        )
    return values.astype(np.int32)


def next_stamp(control: Control, row: int, *parts: object) -> np.uint64:
    """The stamp of a row after a call that changed it by `parts`."""
    return _digest(control.requests.stamp[row], *parts)


def _digest(stamp: np.uint64, *parts: object) -> np.uint64:
    digest = hashlib.blake2b(stamp.tobytes(), digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return np.uint64(int.from_bytes(digest.digest(), "little"))
