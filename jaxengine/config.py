"""What a caller may choose, checked once when it is chosen and frozen from then on.

`EngineConfig` sizes an engine, `RequestOptions` belongs to a request, `TurnOptions` to one turn; for how tokens are
chosen see `sampling_params`.
Everything behind these classes trusts their values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxengine.checks import (
    Check,
    check_fields,
    instance_of,
    one_of,
    require_bool,
    require_count,
    require_int,
    require_number,
    require_positive,
)
from jaxengine.grammars import Grammar
from jaxengine.policies import SchedulingPolicy, decode_first
from jaxengine.proposers import NgramDrafts
from jaxengine.sampling_params import SamplingParams
from pallas_kernels import Backend

Batching = Literal["dynamic", "static"]
Preemption = Literal["recompute", "none"]
FailurePolicy = Literal["stop", "isolate"]


def _policy(label: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{label} is {value!r}; give a function from Candidates to their order")
    return value


_ENGINE_CHECKS: dict[str, Check] = {
    "max_batch_size": require_positive,
    "max_scheduled_tokens": require_positive,
    "num_blocks": require_positive,
    "block_size": require_positive,
    "chunk_size": require_positive,
    "memory_fraction": lambda label, value: require_number(label, value, 0.0, 1.0),
    "fairness_bound": require_positive,
    "policy": _policy,
    "preemption": one_of(Preemption),
    "failure_policy": one_of(FailurePolicy),
    "max_row_retries": require_count,
    "batching": one_of(Batching),
    "backend": one_of(Backend),
    "deterministic": require_bool,
    "check_invariants": require_bool,
}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of one engine.

    Attributes:
        max_batch_size: Most requests that may hold cache, and most rows of a step.
        max_scheduled_tokens: Most tokens of one step, over all rows.
        num_blocks: Blocks in the KV pool; None takes as many as `memory_fraction` of the free memory holds, but no more
            than a full batch of the longest sessions can use.
        block_size: Token slots in a block.
        chunk_size: Most tokens of one row's prefill in one step; None takes the model folder's `search.chunk_size`, and
            where it has none sets no limit but `max_scheduled_tokens`. With a limit, attention layers with a window
            keep what that window and one chunk need, whatever the length of a sequence (`jaxengine.windows`).
        memory_fraction: Share of the free memory for a pool of no given size; None takes 0.9 of an accelerator's and
            0.25 of a host's, which others use too.
        fairness_bound: Most steps for which a request is passed over while others are served, if it could run or if
            it waits for blocks that finishing work could free; `jaxengine.scheduling` says where it can't be kept.
        policy: In which order requests are considered within that bound.
        preemption: What happens when nobody can go on, or a request has waited up to the bound for blocks: "recompute"
            takes the blocks of a younger one back and runs its tokens again later, with the same outcome; "none"
            leaves it to the caller to close something.
        failure_policy: What an unknown error before the device write costs: "stop" ends every turn and the engine,
            "isolate" tries the step again and then its rows in halves, and ends the request that fails alone.
        max_row_retries: How often a step with non-finite logits is tried again before the request behind them fails.
        batching: "dynamic" lets requests come and go at every step; so does None, unless the model folder's `engine`
            section asks for a static batch and for no dynamic one. "static" forms a batch of all that wait, as many as
            rows fit a step, and runs it to its end, which newcomers wait for. Its cache is contiguous: `max_batch_size`
            times the longest session, so `num_blocks` and `block_size` can't be given, nobody is ever short of blocks,
            and `fairness_bound` and `preemption` have nothing to decide. Only a batch of one takes further turns.
        backend: Where attention and the write into the pages run: "xla" is plain JAX, exact on a CPU; "mosaic_gpu" are
            kernels for NVIDIA GPUs; "interpret" runs these on a CPU, very slowly, and looks for races. None takes
            kernels on GPUs that they can run on, for the layers whose shapes they take, and warns once of the others.
        deterministic: Whether a GPU kernel's way of summing must not depend on the other rows of a step, at the cost of
            a slower decode of few rows. On a CPU it never does.
        check_invariants: Check the whole state after every committed step, for debugging.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    max_batch_size: int = 8
    max_scheduled_tokens: int = 2048
    num_blocks: int | None = None
    block_size: int = 16
    chunk_size: int | None = None
    memory_fraction: float | None = None
    fairness_bound: int = 64
    policy: SchedulingPolicy = decode_first
    preemption: Preemption = "recompute"
    failure_policy: FailurePolicy = "stop"
    max_row_retries: int = 2
    batching: Batching | None = None
    backend: Backend | None = None
    deterministic: bool = False
    check_invariants: bool = False

    def __post_init__(self) -> None:
        optional = ("num_blocks", "chunk_size", "memory_fraction", "batching", "backend")
        check_fields(self, _ENGINE_CHECKS, _ENGINE_CHECKS.keys() - set(optional))
        if self.num_blocks is not None:
            require_positive("EngineConfig.num_blocks * block_size", self.num_blocks * self.block_size)


def resolve_chunk_size(config: EngineConfig, search: Mapping[str, Any]) -> int | None:
    """Returns the limit on one row's tokens, the caller's or else the model folder's; None for no limit.

    Args:
        config: The caller's settings.
        search: The folder's section, of which `chunk_size` is read; 0 is no limit.

    Raises:
        TypeError: The folder's value is needed and no integer.
        ValueError: The folder's value is needed and negative.
    """
    if config.chunk_size is not None or search.get("chunk_size") is None:
        return config.chunk_size
    return require_int("search.chunk_size of the model folder", search["chunk_size"], 0) or None


_SAMPLING = instance_of(SamplingParams, "a SamplingParams")
_GRAMMAR = instance_of(Grammar, "what Grammar.json_schema, .regex or .lark returned")
_PROPOSER = instance_of(NgramDrafts, "an NgramDrafts")


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Settings of one request, for all its turns.

    Attributes:
        max_session_tokens: Limit on every token of the request, prompts and generated ones of all turns together;
            None or 0 takes the model's own limit. A model with rotary tables for short and for long sequences takes
            the long ones from the first token on if this limit is above the length at which they begin.
        sampling: How its tokens are chosen.
        grammar: What each turn follows; None lets it say anything.
        proposer: Where drafts come from that nobody sets; None proposes none.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    max_session_tokens: int | None = None
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    grammar: Grammar | None = None
    proposer: NgramDrafts | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_session_tokens": require_count,
            "sampling": _SAMPLING,
            "grammar": _GRAMMAR,
            "proposer": _PROPOSER,
        }
        check_fields(self, checks, ("sampling",))


@dataclasses.dataclass(frozen=True)
class TurnOptions:
    """Settings of one turn.

    Attributes:
        max_generated_tokens: Limit on the tokens generated in this turn; 0 or None sets none.
        sampling: How this turn's tokens are chosen, in place of the request's settings as a whole; None keeps those. A
            seed that is left open is the request's.
        grammar: What this turn follows; None takes the request's.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    max_generated_tokens: int | None = 0
    sampling: SamplingParams | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        checks = {"max_generated_tokens": require_count, "sampling": _SAMPLING, "grammar": _GRAMMAR}
        check_fields(self, checks)
