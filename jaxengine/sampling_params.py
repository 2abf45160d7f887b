"""How tokens are chosen: what a caller may ask for, and what that comes to beside a model folder's own settings.

The order in which the settings act is that of `jaxengine.sampling`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxengine.checks import (
    Check,
    check_fields,
    one_of,
    require_bool,
    require_count,
    require_int,
    require_number,
)
from jaxengine.text import require_stops

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this one mean arg-max: below it float32 cannot tell neighbouring logits apart anyway."""
MOST_LOGPROBS = 20
"""Most alternatives of a token that can be asked for."""
LogprobStage = Literal["model", "sampling"]
_LARGEST = 3.4e38
_PACKAGE = str(Path(__file__).parent) + os.sep


def _penalty(label: str, value: object) -> float:
    # Within these bounds float32 logits that a model may have stay finite.
    return require_number(label, value, 1e-6, 1e6)


def _biases(label: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        pairs = tuple(value.items())
    elif isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs = value
    else:
        raise TypeError(
            f"{label} is {value!r}; give a mapping from token ids to what is added to their logits"
        )
    biases: dict[int, float] = {}
    for key, bias in pairs:
        token = require_int(f"a token of {label}", key, 0)
        if token in biases:
            raise ValueError(f"{label} names token {token} twice; give it one value")
        biases[token] = require_number(f"{label}[{token}]", bias, -_LARGEST, _LARGEST)
    return tuple(sorted(biases.items()))


def _token_ids(label: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{label} is {value!r}; give a list of token ids")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise TypeError(f"{label} is an array of {value.ndim} dimensions; give a list of token ids")
    return tuple(sorted({require_int(f"a token of {label}", token, 0) for token in value}))


_CHECKS: dict[str, Check] = {
    "temperature": lambda label, value: require_number(label, value, 0.0, _LARGEST),
    "top_k": require_count,
    "top_p": lambda label, value: require_number(label, value, 0.0, 1.0),
    "min_p": lambda label, value: require_number(label, value, 0.0, 1.0),
    "do_sample": require_bool,
    "seed": lambda label, value: require_int(label, value, 0, 2**32 - 1),
    "repetition_penalty": _penalty,
    "presence_penalty": lambda label, value: require_number(label, value, -2.0, 2.0),
    "frequency_penalty": lambda label, value: require_number(label, value, -2.0, 2.0),
    "no_repeat_ngram_size": require_count,
    "logit_bias": _biases,
    "min_new_tokens": require_count,
    "stop_token_ids": _token_ids,
    "ignore_eos": require_bool,
    "stop": require_stops,
    "logprobs": lambda label, value: require_int(label, value, 0, MOST_LOGPROBS),
    "prompt_logprobs": lambda label, value: require_int(label, value, 0, MOST_LOGPROBS),
    "logprobs_from": one_of(LogprobStage),
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; a field that the folder's `search` section knows and that is None takes its value.

    Attributes:
        temperature: Divides the logits; 0 means arg-max.
        top_k: Keep the k best tokens; 0 keeps all, 1 means arg-max.
        top_p: Keep the smallest head of the renormalised distribution that reaches this probability; 1 keeps all.
        do_sample: False means arg-max. None samples when temperature, top_k, top_p or min_p is given, else as the
            folder says.
        seed: Selects the request's random stream; None takes the request's id.
        min_p: Keep tokens of at least this share of the likeliest one's probability; 0 keeps all.
        repetition_penalty: Divides positive logits of tokens in the sequence, and multiplies negative ones; 1 is off.
        presence_penalty: Taken from the logit of each token that this turn has generated.
        frequency_penalty: Taken from it once more for each time.
        no_repeat_ngram_size: No run of so many tokens comes twice in the sequence; 0 is off.
        logit_bias: Added to the logits of the given tokens.
        min_new_tokens: The turn doesn't end by an EOS or a token of `stop_token_ids` before it has generated so many.
        stop_token_ids: Tokens that end a turn as an EOS does, and like it aren't part of it.
        ignore_eos: The model's EOS tokens, all of them, are tokens like any other.
        stop: Strings that end a turn once its text holds one; the text ends before it, the tokens with the one that
            completes it.
        logprobs: Report the log-probability of each generated token and of so many of the likeliest; None reports none.
        prompt_logprobs: Report the same of each token of the turn's input, from the model's logits; its first token has
            none where nothing comes before it or an EOS ended the turn before.
        logprobs_from: "model" takes them from the model's logits as they are, "sampling" from the distribution that the
            token was drawn from, where a token that can't be drawn has -inf.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    do_sample: bool | None = None
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    logprobs_from: LogprobStage = "model"
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        inherited = ("temperature", "top_k", "top_p", "do_sample", "seed", "repetition_penalty")
        optional = {*inherited, "no_repeat_ngram_size", "logprobs", "prompt_logprobs"}
        check_fields(self, _CHECKS, _CHECKS.keys() - optional)


@dataclasses.dataclass(frozen=True)
class ResolvedSampling:
    """Sampling settings with nothing left open but the seed.

    Attributes:
        temperature: 0 for arg-max.
        top_k, top_p, min_p: 0, 1 and 0 for off.
        repetition_penalty: 1 for off.
        no_repeat_ngram_size: 0 for off.
        min_length: Tokens of the sequence, prompt included, before which no turn ends by EOS; the folder's.
        biases: Pairs of a token and what is added to its logit.
        stop: Strings that end a turn.
        asked: What the caller gave, for everything else that the folder has no say in.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    min_length: int
    biases: tuple[tuple[int, float], ...]
    stop: tuple[str, ...]
    asked: SamplingParams


def resolve_sampling(params: SamplingParams, search: Mapping[str, Any]) -> ResolvedSampling:
    """Fills the unset fields of `params` from a model folder's `search` section and folds every greedy form into one.

    Args:
        params: The caller's settings.
        search: The folder's section; keys `do_sample`, `temperature`, `top_k`, `top_p`, `repetition_penalty`,
            `no_repeat_ngram_size` and `min_length` are read.

    Returns:
        The settings that the sampler works from.

    Raises:
        TypeError: A value of the folder that is needed has the wrong type.
        ValueError: A value of the folder that is needed is out of range.
    """

    def folders(name: str, default: bool | float, check: Check) -> Any:
        return check(f"search.{name} of the model folder", search.get(name, default))

    def setting(name: str, default: bool | float) -> Any:
        own = getattr(params, name)
        return folders(name, default, _CHECKS[name]) if own is None else own

    greedy = ResolvedSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=setting("repetition_penalty", 1.0),
        no_repeat_ngram_size=setting("no_repeat_ngram_size", 0),
        min_length=folders("min_length", 0, require_count),
        biases=_biases("SamplingParams.logit_bias", params.logit_bias),
        stop=require_stops("SamplingParams.stop", params.stop),
        asked=dataclasses.replace(params),
    )
    asked = params.min_p > 0 or any(
        value is not None for value in (params.temperature, params.top_k, params.top_p)
    )
    if not (params.do_sample is None and asked) and not setting("do_sample", False):
        return greedy
    temperature, top_k, top_p = setting("temperature", 1.0), setting("top_k", 0), setting("top_p", 1.0)
    if temperature <= GREEDY_TEMPERATURE:
        return greedy
    if top_k == 1 or top_p == 0.0:
        return greedy
    return dataclasses.replace(greedy, temperature=temperature, top_k=top_k, top_p=top_p, min_p=params.min_p)


def warn_of_greedy_folder(params: SamplingParams, search: Mapping[str, Any]) -> None:
    """Warns, at the line that called this package, if all that keeps `params` from sampling is the folder's top_k."""
    if params.top_k is not None or search.get("top_k") != 1:
        return
    if resolve_sampling(params, {**search, "top_k": 0}).temperature > 0:
        warnings.warn(
            "sampling was asked for but the model folder sets top_k to 1, which makes every choice greedy; "
            "set SamplingParams.top_k to sample",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """The `stacklevel`, for whoever calls this, of the innermost line outside of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
