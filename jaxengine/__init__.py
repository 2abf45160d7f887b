"""Continuous batching over a paged KV cache in JAX, with the engine's whole state as one immutable value.

`Engine` is the ordinary way in; the functions beneath it (`init_state`, `create_request`, `begin_turn`, `plan_step`,
`execute`, `commit`, `drain`) are the same behaviour as pure functions over `EngineState`.
"""

from jaxengine.config import EngineConfig, RequestOptions, TurnOptions
from jaxengine.drafts import max_draft_tokens_per_proposal, set_draft_tokens
from jaxengine.engine import Engine
from jaxengine.errors import (
    ContractError,
    EngineError,
    ExecutionCapacityError,
    ExecutionError,
    RequestFailure,
    RequestStateError,
    RetryableStepError,
    SpentStateError,
    StaleTransactionError,
    StepError,
    StoreLostError,
)
from jaxengine.events import (
    EngineErrorCode,
    EngineEventFlags,
    EventRecord,
    FinishReason,
    TokenLogprobs,
    Usage,
)
from jaxengine.failures import outcome_of
from jaxengine.faults import Fault, Stage, inject_fault
from jaxengine.grammars import Grammar
from jaxengine.handles import Event, EventStream, Request
from jaxengine.invariants import InvariantViolation, check_invariants
from jaxengine.llm import LLM, Completion
from jaxengine.metrics import EngineMetrics
from jaxengine.model import Model, load_model
from jaxengine.planning import PlanRow, StepOutcome, StepPlan, plan_step
from jaxengine.policies import Candidates, SchedulingPolicy, decode_first
from jaxengine.proposers import NgramDrafts
from jaxengine.requests import begin_turn, cancel_turn, close_request, create_request, drain
from jaxengine.sampling_params import SamplingParams
from jaxengine.state import EngineState, RequestStatus, init_state
from jaxengine.text import ChatTemplate, StreamDecoder, TextError, Tokenizer
from jaxengine.transaction import Transaction, commit, execute, step

__all__ = [
    "LLM",
    "Candidates",
    "ChatTemplate",
    "Completion",
    "ContractError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineErrorCode",
    "EngineEventFlags",
    "EngineMetrics",
    "EngineState",
    "Event",
    "EventRecord",
    "EventStream",
    "ExecutionCapacityError",
    "ExecutionError",
    "Fault",
    "FinishReason",
    "Grammar",
    "InvariantViolation",
    "Model",
    "NgramDrafts",
    "PlanRow",
    "Request",
    "RequestFailure",
    "RequestOptions",
    "RequestStateError",
    "RequestStatus",
    "RetryableStepError",
    "SamplingParams",
    "SchedulingPolicy",
    "SpentStateError",
    "Stage",
    "StaleTransactionError",
    "StepError",
    "StepOutcome",
    "StepPlan",
    "StoreLostError",
    "StreamDecoder",
    "TextError",
    "TokenLogprobs",
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
    "decode_first",
    "drain",
    "execute",
    "init_state",
    "inject_fault",
    "load_model",
    "max_draft_tokens_per_proposal",
    "outcome_of",
    "plan_step",
    "set_draft_tokens",
    "step",
]
