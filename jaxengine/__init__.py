"""Continuous batching over a paged KV cache in JAX, with the engine's whole state as one immutable value.

`Engine` is the ordinary way in; the functions beneath it (`init_state`, `create_request`, `begin_turn`, `plan_step`,
`execute`, `commit`, `drain`) are the same behaviour as pure functions over `EngineState`.
"""

from jaxengine.config import EngineConfig, RequestOptions, SamplingParams, TurnOptions
from jaxengine.engine import Engine, EngineMetrics, Event, Request
from jaxengine.errors import (
    EngineError,
    RequestStateError,
    RetryableStepError,
    SpentStateError,
    StaleTransactionError,
)
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason, Usage
from jaxengine.invariants import InvariantViolation, check_invariants
from jaxengine.llm import LLM, Completion
from jaxengine.model import Model, load_model
from jaxengine.planning import PlanRow, StepOutcome, StepPlan, plan_step
from jaxengine.requests import begin_turn, cancel_turn, close_request, create_request, drain
from jaxengine.state import EngineState, RequestStatus, init_state
from jaxengine.text import ChatTemplate, StreamDecoder, TextError, Tokenizer
from jaxengine.transaction import Transaction, commit, execute, step

__all__ = [
    "LLM",
    "ChatTemplate",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineErrorCode",
    "EngineEventFlags",
    "EngineMetrics",
    "EngineState",
    "Event",
    "EventRecord",
    "FinishReason",
    "InvariantViolation",
    "Model",
    "PlanRow",
    "Request",
    "RequestOptions",
    "RequestStateError",
    "RequestStatus",
    "RetryableStepError",
    "SamplingParams",
    "SpentStateError",
    "StaleTransactionError",
    "StepOutcome",
    "StepPlan",
    "StreamDecoder",
    "TextError",
    "Tokenizer",
    "Transaction",
    "TurnOptions",
    "Usage",
    "begin_turn",
    "cancel_turn",
    "check_invariants",
    "close_request",
    "commit",
    "create_request",
    "drain",
    "execute",
    "init_state",
    "load_model",
    "plan_step",
    "step",
]
