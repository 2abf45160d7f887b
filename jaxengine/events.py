"""Records of what a committed step, a cancellation or a failure made visible."""

from __future__ import annotations

import dataclasses
import enum


class EngineEventFlags(enum.IntFlag):
    """What an event carries; a bit mask, so test bits, not equality."""

    NONE = 0
    TOKEN = 1
    TURN_FINISHED = 2
    FAILED = 4
    CAPACITY_BLOCKED = 8
    RETRYABLE = 16
    GRAMMAR_INCOMPLETE = 32
    """A limit or a stop string ended the turn, and the grammar doesn't allow its text to end there."""


class FinishReason(enum.IntEnum):
    """Why a turn ended; where several hold at once, the first in this order is reported."""

    NONE = 0
    EOS = 1
    STOP_STRING = 2
    MAX_GENERATED_TOKENS = 3
    MAX_SESSION_TOKENS = 4
    CANCELLED = 5
    FAILED = 6


class EngineErrorCode(enum.IntEnum):
    """What went wrong, for an event with FAILED, CAPACITY_BLOCKED or RETRYABLE."""

    NONE = 0
    CAPACITY_DEFERRED = 1
    REQUEST_UNSERVICEABLE = 2
    RETRYABLE_EXECUTION = 3
    EXECUTION_CAPACITY_EXCEEDED = 4
    ENGINE_CONTRACT_FAILURE = 5
    ENGINE_EXECUTION_FAILURE = 6
    GUIDANCE_FAILURE = 7


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one turn.

    Attributes:
        prompt_tokens: Tokens that the turn's `begin_turn` brought.
        generated_tokens: Tokens generated and appended; an EOS is neither.
        cached_prompt_tokens: Prompt tokens whose keys and values came from a cache.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities where a token was chosen.

    Attributes:
        chosen: The token's own.
        top: The likeliest tokens and theirs, best first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """One event as the state's queue holds it.

    Attributes:
        request_id: The request, or 0 for an event of the engine as a whole.
        turn_id: The request's turn, or 0.
        flags: Which of the other fields carry something.
        token: A visible token; valid with TOKEN.
        finish_reason: Valid with TURN_FINISHED.
        error_code: Valid with FAILED, CAPACITY_BLOCKED and RETRYABLE.
        detail: A sentence for people, or empty.
        usage: The turn's counts; valid with TURN_FINISHED.
        text: What may be shown now: text of this and of earlier tokens that can be no part of a stop string, with no
            broken characters. All of a turn's texts joined are its text.
        stop: The stop string that ended the turn, or empty.
        logprobs: Of the token, or None.
        prompt_logprobs: Of each token of the turn's input, with the turn's first choice, where they are asked for; None
            for a first token that nothing predicts: that of the sequence, and one behind an EOS.
    """

    request_id: int
    turn_id: int
    flags: EngineEventFlags
    token: int = -1
    finish_reason: FinishReason = FinishReason.NONE
    error_code: EngineErrorCode = EngineErrorCode.NONE
    detail: str = ""
    usage: Usage = Usage()
    text: str = ""
    stop: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
