"""What a caller may choose, checked once when it is chosen and frozen from then on.

`EngineConfig` sizes an engine, `RequestOptions` and `SamplingParams` belong to a request, `TurnOptions` to one turn.
Everything behind these classes trusts their values.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this one mean arg-max: below it float32 cannot tell neighbouring logits apart anyway."""


def _require_int(name: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; give an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; give a value from {low} to {high}")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; give a number")
    if not low <= value <= high or math.isinf(value):
        raise ValueError(f"{name} is {value}; give a finite value from {low} to {high}")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of one engine.

    Attributes:
        max_batch_size: Most requests that may hold cache, and most rows of a step.
        max_scheduled_tokens: Most tokens of one step, over all rows.
        num_blocks: Blocks in the KV pool.
        block_size: Token slots in a block.
        chunk_size: Most tokens of one row's prefill in one step; None sets no limit but `max_scheduled_tokens`.
        max_row_retries: How often a step with non-finite logits is tried again before the request behind them fails.

    Raises:
        TypeError: A field is no integer.
        ValueError: A field is out of range.
    """

    max_batch_size: int = 8
    max_scheduled_tokens: int = 2048
    num_blocks: int = 256
    block_size: int = 16
    chunk_size: int | None = None
    max_row_retries: int = 2

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_scheduled_tokens", "num_blocks", "block_size"):
            _require_int(f"EngineConfig.{name}", getattr(self, name), 1)
        if self.chunk_size is not None:
            _require_int("EngineConfig.chunk_size", self.chunk_size, 1)
        _require_int("EngineConfig.max_row_retries", self.max_row_retries, 0)
        _require_int("EngineConfig.num_blocks * block_size", self.num_blocks * self.block_size, 1)


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
        if self.temperature is not None:
            _require_number("SamplingParams.temperature", self.temperature, 0.0, 3.4e38)
        if self.top_k is not None:
            _require_int("SamplingParams.top_k", self.top_k, 0)
        if self.top_p is not None:
            _require_number("SamplingParams.top_p", self.top_p, 0.0, 1.0)
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise TypeError(f"SamplingParams.do_sample is {self.do_sample!r}; give True or False")
        if self.seed is not None:
            _require_int("SamplingParams.seed", self.seed, 0, 2**32 - 1)


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
    """
    asked = any(value is not None for value in (params.temperature, params.top_k, params.top_p))
    do_sample = params.do_sample if params.do_sample is not None else asked or bool(search.get("do_sample", False))
    temperature = params.temperature if params.temperature is not None else float(search.get("temperature", 1.0))
    top_k = params.top_k if params.top_k is not None else int(search.get("top_k", 0))
    top_p = params.top_p if params.top_p is not None else float(search.get("top_p", 1.0))
    wants_sampling = do_sample and temperature > GREEDY_TEMPERATURE
    if wants_sampling and params.top_k is None and top_k == 1:
        warnings.warn(
            "sampling was asked for but the model folder sets top_k to 1, which makes every choice greedy; "
            "set SamplingParams.top_k to sample",
            stacklevel=2,
        )
    if not wants_sampling or top_k == 1 or top_p == 0.0:
        return ResolvedSampling(temperature=0.0, top_k=0, top_p=1.0, seed=params.seed)
    return ResolvedSampling(float(temperature), top_k, float(top_p), params.seed)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Settings of one request, for all its turns.

    Attributes:
        max_session_tokens: Limit on every token of the request, prompts and generated ones of all turns together;
            None or 0 takes the model's own limit.
        sampling: How its tokens are chosen.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    max_session_tokens: int | None = None
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if self.max_session_tokens is not None:
            _require_int("RequestOptions.max_session_tokens", self.max_session_tokens, 0)
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
        if self.max_generated_tokens is not None:
            _require_int("TurnOptions.max_generated_tokens", self.max_generated_tokens, 0)
