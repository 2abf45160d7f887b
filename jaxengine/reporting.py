"""Log-probabilities: which rows of logits give them, and what they tell of tokens and of prompts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxengine.carried import Traits, next_scored
from jaxengine.events import TokenLogprobs
from jaxengine.planning import StepPlan
from jaxengine.programs import Bucket
from jaxengine.sampling import Logprobs
from jaxengine.settling import Settled
from jaxengine.state import Control


class Reports(NamedTuple):
    """Which log-probabilities rows of logits give, padded to the bucket.

    Attributes:
        processed: bool[rows], whether of the distribution drawn from.
        targets: int32[rows], of which token; -1 for the chosen one.
    """

    processed: np.ndarray
    targets: np.ndarray


def reports_of(control: Control, plan: StepPlan, bucket: Bucket) -> Reports | None:
    """Which log-probabilities a plan's rows of logits give; None if nobody asks for any."""
    traits = control.requests.traits[plan.index]
    wanted = np.flatnonzero(traits & (Traits.LOGPROBS * plan.samples | Traits.SCORED * plan.is_prefill))
    if len(wanted) == 0:
        return None
    processed, targets = np.zeros(bucket.logits, bool), np.full(bucket.logits, -1, np.int32)
    starts = np.cumsum(plan.num_logits) - plan.num_logits
    for i in wanted:
        turn = control.requests.carried[plan.index[i]].turn
        first, last = int(starts[i]), int(plan.first_choice[i])
        if plan.samples[i]:
            processed[last : last + 1 + plan.num_drafts[i]] = turn.sampling.asked.logprobs_from == "sampling"
        if traits[i] & Traits.SCORED and plan.is_prefill[i]:
            # What is run again is scored already, and may be another turn's.
            end = int(plan.past[i] + plan.num_tokens[i])
            predicts = end - int(plan.num_logits[i]) + 1
            low = max(predicts, next_scored(control.requests.carried[plan.index[i]]))
            scored = control.tokens.read(int(plan.index[i]), low, max(low, min(end + 1, turn.stop)))
            targets[first + low - predicts :][: len(scored)] = scored
    return Reports(processed, targets)


def with_reports(
    control: Control, plan: StepPlan, settled: Settled, reports: Reports, logprobs: Logprobs
) -> Settled:
    """Adds the log-probabilities that turns report, of their tokens and of their input."""
    made: Logprobs = jax.tree.map(np.asarray, logprobs)
    return dataclasses.replace(
        settled,
        logprobs=_logprobs(control, plan, settled, made),
        scores=_scores(control, plan, reports, made),
    )


def _logprobs(control: Control, plan: StepPlan, settled: Settled, made: Logprobs) -> dict[int, TokenLogprobs]:
    """Those of the choices that are part of a turn which reports them."""
    found = {}
    for nth, (i, place) in enumerate(zip(settled.row, settled.place, strict=True)):
        count = control.requests.carried[plan.index[i]].turn.sampling.asked.logprobs
        if count is not None and not settled.ends[nth]:
            found[nth] = _told(made, place, count)
    return found


def _scores(
    control: Control, plan: StepPlan, reports: Reports, made: Logprobs
) -> dict[int, tuple[TokenLogprobs | None, ...]]:
    """Of the next tokens of the inputs of turns that report them; None for those that nothing here predicts."""
    found: dict[int, tuple[TokenLogprobs | None, ...]] = {}
    starts = np.cumsum(plan.num_logits) - plan.num_logits
    for i in np.flatnonzero((control.requests.traits[plan.index] & Traits.SCORED > 0) & plan.is_prefill):
        carried = control.requests.carried[plan.index[i]]
        places = range(int(starts[i]), int(starts[i] + plan.num_logits[i]))
        scored = [place for place in places if reports.targets[place] >= 0]
        if not scored:
            continue
        predicts = int(plan.past[i] + plan.num_tokens[i] - plan.num_logits[i]) + 1
        unknown = predicts + scored[0] - places[0] - carried.turn.start - len(carried.scores)
        count = carried.turn.sampling.asked.prompt_logprobs
        found[int(i)] = (*(None,) * unknown, *(_told(made, place, count) for place in scored))
    return found


def _told(made: Logprobs, place: int, count: int) -> TokenLogprobs:
    top = zip(made.ids[place, :count].tolist(), made.values[place, :count].tolist(), strict=True)
    return TokenLogprobs(float(made.chosen[place]), tuple(top))
