"""A turn's settings: the caller's beside the model folder's, and the columns that hold them."""

from __future__ import annotations

import dataclasses

from jaxengine.carried import Carried, Turn, traits_of
from jaxengine.grammars import Grammar
from jaxengine.sampling_params import SamplingParams, resolve_sampling
from jaxengine.state import Control


def turn_of(
    control: Control, sampling: SamplingParams, grammar: Grammar | None, span: tuple[int, int]
) -> Turn:
    """A turn's settings beside the folder's, its input at `span`; raises ValueError for what this model can't do."""
    facts = control.facts
    resolved = resolve_sampling(sampling, facts.search_settings)
    biased = [token for token, _ in resolved.biases]
    for name, tokens in (("logit_bias", biased), ("stop_token_ids", list(sampling.stop_token_ids))):
        if tokens and max(tokens) >= facts.vocab_size:
            raise ValueError(
                f"SamplingParams.{name} names token {max(tokens)}; the vocabulary has ids up to {facts.vocab_size - 1}"
            )
    for name, value, remedy in (
        ("SamplingParams.stop", sampling.stop, "use stop_token_ids instead"),
        ("a grammar", grammar, "use a model with one"),
    ):
        if value and not facts.has_text:
            raise ValueError(f"{name} needs text, but this model has no tokenizer; {remedy}")
    eos = frozenset() if sampling.ignore_eos else facts.eos_token_ids
    if grammar is not None and not eos:
        raise ValueError(
            "a grammar ends with an EOS, and this turn has none; use a model with one, not ignore_eos"
        )
    return Turn(resolved, grammar, eos.union(sampling.stop_token_ids), *span)


def turn_columns(control: Control, request_id: int, carried: Carried, turn: Turn) -> dict[str, object]:
    """What a turn's settings put into the columns of its request."""
    sampling, asked = turn.sampling, turn.sampling.asked
    least = max(asked.min_new_tokens, sampling.min_length - turn.stop, 0)
    seeds = (asked.seed, carried.own.seed, request_id % 2**32)
    return {
        "temperature": sampling.temperature,
        "top_k": min(sampling.top_k, control.facts.vocab_size),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": next(seed for seed in seeds if seed is not None),
        "least": least,
        "num_drafts": 0,
        "traits": traits_of(carried, turn, minimum=least > 0, text=control.facts.has_text),
        "carried": dataclasses.replace(carried, turn=turn, text=None, unshown="", drafts=(), scores=()),
    }
