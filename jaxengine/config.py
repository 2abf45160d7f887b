"""What a caller may choose, checked once when it is chosen and frozen from then on.

`EngineConfig` sizes an engine, `RequestOptions` and `SamplingParams` belong to a request, `TurnOptions` to one turn.
Everything behind these classes trusts their values.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from jaxengine.policies import SchedulingPolicy, decode_first

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this one mean arg-max: below it float32 cannot tell neighbouring logits apart anyway."""


def _int(label: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{label} is {value!r}; give an integer")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{label} is {number}; give a value from {low} to {high}")
    return number


def _number(label: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{label} is {value!r}; give a number")
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{label} is {number}; give a finite value from {low} to {high}")
    return number


def _bool(label: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{label} is {value!r}; give True or False")
    return value


def _positive(label: str, value: object) -> int:
    return _int(label, value, 1)


def require_count(label: str, value: object) -> int:
    """Returns `value` as an int.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative.
    """
    return _int(label, value, 0, 2**63 - 1)


Check = Callable[[str, Any], Any]


def _check_fields(options: object, checks: Mapping[str, Check], required: Collection[str] = ()) -> None:
    """Checks the named fields, those not required only if they are set, and keeps plain numbers in place of NumPy's."""
    for name, check in checks.items():
        value = getattr(options, name)
        if value is not None or name in required:
            object.__setattr__(options, name, check(f"{type(options).__name__}.{name}", value))


Batching = Literal["dynamic", "static"]
Preemption = Literal["recompute", "none"]
FailurePolicy = Literal["stop", "isolate"]


def _one_of(kind: Any) -> Check:
    names = get_args(kind)

    def check(label: str, value: object) -> object:
        if not isinstance(value, str) or value not in names:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{label} is {value!r}; give one of {', '.join(map(repr, names))}")
        return value

    return check


def _policy(label: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{label} is {value!r}; give a function from Candidates to their order")
    return value


_ENGINE_CHECKS: dict[str, Check] = {
    "max_batch_size": _positive,
    "max_scheduled_tokens": _positive,
    "num_blocks": _positive,
    "block_size": _positive,
    "chunk_size": _positive,
    "memory_fraction": lambda label, value: _number(label, value, 0.0, 1.0),
    "fairness_bound": _positive,
    "policy": _policy,
    "preemption": _one_of(Preemption),
    "failure_policy": _one_of(FailurePolicy),
    "max_row_retries": require_count,
    "batching": _one_of(Batching),
    "check_invariants": _bool,
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
    check_invariants: bool = False

    def __post_init__(self) -> None:
        optional = ("num_blocks", "chunk_size", "memory_fraction", "batching")
        _check_fields(self, _ENGINE_CHECKS, _ENGINE_CHECKS.keys() - set(optional))
        if self.num_blocks is not None:
            _positive("EngineConfig.num_blocks * block_size", self.num_blocks * self.block_size)


_SAMPLING_CHECKS: dict[str, Check] = {
    "temperature": lambda label, value: _number(label, value, 0.0, 3.4e38),
    "top_k": require_count,
    "top_p": lambda label, value: _number(label, value, 0.0, 1.0),
    "do_sample": _bool,
    "seed": lambda label, value: _int(label, value, 0, 2**32 - 1),
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; a field left at None takes the model folder's `search` value.

    Attributes:
        temperature: Divides the logits; 0 means arg-max.
        top_k: Keep the k best tokens; 0 keeps all, 1 means arg-max.
        top_p: Keep the smallest head of the renormalised distribution that reaches this probability; 1 keeps all.
        do_sample: False means arg-max. None samples when temperature, top_k or top_p is given, else as the folder says.
        seed: Selects the request's random stream; None takes the request's id.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    do_sample: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self, _SAMPLING_CHECKS)


@dataclasses.dataclass(frozen=True)
class ResolvedSampling:
    """Sampling settings with nothing left open: temperature 0 is arg-max, top_k 0 and top_p 1 are off."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None


def resolve_sampling(params: SamplingParams, search: Mapping[str, Any]) -> ResolvedSampling:
    """Fills the unset fields of `params` from a model folder's `search` section and folds every greedy form into one.

    Args:
        params: The caller's settings.
        search: The folder's section; keys `do_sample`, `temperature`, `top_k` and `top_p` are read.

    Returns:
        The settings that the sampler works from.

    Raises:
        TypeError: A value of the folder that is needed has the wrong type.
        ValueError: A value of the folder that is needed is out of range.
    """

    def setting(name: str, default: bool | float) -> Any:
        own = getattr(params, name)
        if own is not None:
            return own
        return _SAMPLING_CHECKS[name](f"search.{name} of the model folder", search.get(name, default))

    asked = any(value is not None for value in (params.temperature, params.top_k, params.top_p))
    greedy = ResolvedSampling(temperature=0.0, top_k=0, top_p=1.0, seed=params.seed)
    if not (params.do_sample is None and asked) and not setting("do_sample", False):
        return greedy
    temperature, top_k, top_p = setting("temperature", 1.0), setting("top_k", 0), setting("top_p", 1.0)
    if temperature <= GREEDY_TEMPERATURE:
        return greedy
    if params.top_k is None and top_k == 1:
        warnings.warn(
            "sampling was asked for but the model folder sets top_k to 1, which makes every choice greedy; "
            "set SamplingParams.top_k to sample",
            stacklevel=2,
        )
    return greedy if top_k == 1 or top_p == 0.0 else ResolvedSampling(temperature, top_k, top_p, params.seed)


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
    return _int("search.chunk_size of the model folder", search["chunk_size"], 0) or None


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Settings of one request, for all its turns.

    Attributes:
        max_session_tokens: Limit on every token of the request, prompts and generated ones of all turns together;
            None or 0 takes the model's own limit. A model with rotary tables for short and for long sequences takes
            the long ones from the first token on if this limit is above the length at which they begin.
        sampling: How its tokens are chosen.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    max_session_tokens: int | None = None
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        _check_fields(self, {"max_session_tokens": require_count})
        if not isinstance(self.sampling, SamplingParams):
            raise TypeError(f"RequestOptions.sampling is {self.sampling!r}; give a SamplingParams")


@dataclasses.dataclass(frozen=True)
class TurnOptions:
    """Settings of one turn.

    Attributes:
        max_generated_tokens: Limit on the tokens generated in this turn; 0 or None sets none.

    Raises:
        TypeError: The field is no integer.
        ValueError: The field is negative.
    """

    max_generated_tokens: int | None = 0

    def __post_init__(self) -> None:
        _check_fields(self, {"max_generated_tokens": require_count})
