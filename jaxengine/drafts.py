"""Drafts: tokens proposed to follow a request's sequence, several of which one step may verify.

`settling` says what is accepted. A proposal belongs to a sequence as it is: the next choice that is made for the
request uses it up, whether its drafts ran, were accepted, or had no room in the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxengine.config import EngineConfig
from jaxengine.errors import RequestStateError
from jaxengine.requests import next_stamp, require_row, require_token_ids
from jaxengine.state import (
    Control,
    EngineState,
    RequestStatus,
    replace_rows,
    require_healthy,
    require_unspent,
)

if TYPE_CHECKING:
    import jax
    import numpy as np


def max_draft_tokens_per_proposal(state: EngineState) -> int:
    """Returns the most tokens that one step can verify of a request: what it can run of one row, less one.

    A static batch verifies none.
    """
    return _most_of_a_row(state.control.config)


def _most_of_a_row(config: EngineConfig) -> int:
    if config.batching == "static":
        return 0
    return min(config.max_scheduled_tokens, config.chunk_size or config.max_scheduled_tokens) - 1


def set_draft_tokens(
    state: EngineState, request_id: int, tokens: Sequence[int] | np.ndarray | jax.Array
) -> EngineState:
    """Proposes what follows a request's sequence; a new proposal takes the place of the old, an empty one clears it.

    Args:
        state: The state; still usable afterwards.
        request_id: A request whose turn is past its input.
        tokens: Ids inside the vocabulary.

    Raises:
        RequestStateError: The request has no live turn, or is still at its input.
        EngineError: A failure has ended the engine's work.
        ValueError: No flat sequence of integers, a token outside the vocabulary, or more than may follow under the
            turn's and the session's limit with one token behind them, or than `max_draft_tokens_per_proposal`; the old
            proposal stays.
    """
    require_unspent(state)
    require_healthy(state.control)
    control = state.control
    row = require_row(control, request_id)
    requests = control.requests
    live = requests.status[row] in (RequestStatus.QUEUED, RequestStatus.ACTIVE)
    if not live or requests.processed[row] < requests.input_end[row]:
        where = "still at its input" if live else RequestStatus(requests.status[row]).name
        raise RequestStateError(
            f"request {request_id} is {where}; propose drafts once its turn has generated a token"
        )
    values = require_token_ids(tokens, control.facts.vocab_size, "the drafts")
    most = most_drafts(control, row)
    if len(values) > most:
        raise ValueError(f"{len(values)} drafts are too many for request {request_id}; give at most {most}")
    drafts = tuple(values.tolist())
    control = with_drafts(control, row, drafts)
    control = replace_rows(control, row, stamp=next_stamp(control, row, b"drafts", drafts))
    return state.replace(control=control)  # type: ignore[attr-defined]


def with_drafts(control: Control, row: int, drafts: tuple[int, ...]) -> Control:
    """Returns `control` with another proposal for a row."""
    carried = control.requests.carried[row]
    return replace_rows(
        control, row, num_drafts=len(drafts), carried=dataclasses.replace(carried, drafts=drafts)
    )


def most_drafts(control: Control, row: int) -> int:
    """Drafts that a request can have: what may follow before the token that reaches a limit, and what a row can run."""
    requests = control.requests
    left = int(requests.max_session[row] - requests.length[row])
    if requests.max_generated[row]:
        left = min(left, int(requests.max_generated[row] - requests.generated[row]))
    return max(min(left - 1, _most_of_a_row(control.config)), 0)
