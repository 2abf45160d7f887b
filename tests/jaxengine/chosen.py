"""Turns under any sampling settings: run alone or in company, and an oracle of what the settings make of toy logits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence

import hypothesis.strategies as st
import numpy as np

import jaxengine as je
from jaxengine.requests import has_pending_work
from jaxengine.toy import LETTERS, logits_after
from tests.jaxengine.harness import finish, tokens_of

WIDE = je.EngineConfig(max_batch_size=16, max_scheduled_tokens=32, num_blocks=64, block_size=4)
PROMPTS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=12)
QUARTERS = st.integers(-8, 8).map(lambda quarters: quarters / 4)

SETTINGS = st.builds(
    je.SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 2.0, 8.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
    seed=st.integers(0, 2**32 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.5]),
    presence_penalty=st.one_of(st.just(0.0), QUARTERS),
    frequency_penalty=st.one_of(st.just(0.0), QUARTERS),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
    logit_bias=st.dictionaries(st.integers(0, LETTERS - 1), QUARTERS, max_size=3),
    min_new_tokens=st.sampled_from([0, 0, 2, 5]),
    stop_token_ids=st.lists(st.integers(0, LETTERS - 1), max_size=2),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("abcst", min_size=1, max_size=2), max_size=2),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
    logprobs_from=st.sampled_from(["model", "sampling"]),
)
"""Every setting; numbers are such that what greedy rows compare is exact in float32."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A request of one turn."""

    prompt: Sequence[int]
    sampling: je.SamplingParams
    limit: int = 8


def begin(state: je.EngineState, row: Row) -> tuple[je.EngineState, int]:
    state, request_id = je.create_request(state, je.RequestOptions(sampling=row.sampling))
    state, _ = je.begin_turn(state, request_id, row.prompt, je.TurnOptions(row.limit))
    return state, request_id


def outcome(
    state: je.EngineState, request_id: int, events: Sequence[je.EventRecord]
) -> tuple[list[int], int, list[je.EventRecord]]:
    """What a caller sees of a request, and how much of it is committed."""
    row = state.control.requests.id.tolist().index(request_id)
    own = [dataclasses.replace(event, request_id=0) for event in events if event.request_id == request_id]
    return tokens_of(state, request_id), int(state.control.requests.processed[row]), own


def alone(
    model: je.Model, row: Row, config: je.EngineConfig = WIDE
) -> tuple[list[int], int, list[je.EventRecord]]:
    state, request_id = begin(je.init_state(model, config), row)
    state, events = finish(model, state)
    return outcome(state, request_id, events)


def together(
    model: je.Model,
    rows: Sequence[Row],
    config: je.EngineConfig = WIDE,
    *,
    arrivals: Sequence[int] = (),
    dropped: Collection[int] = (),
    faults: Mapping[int, je.Stage] | None = None,
    drafts: Mapping[int, Sequence[int]] | None = None,
) -> list[tuple[list[int], int, list[je.EventRecord]]]:
    """Serves all rows at once: the nth arrives at step `arrivals[n]`, some steps are run in vain, some fail.

    At step number n, `drafts[n]` are proposed to whoever takes them.
    """
    state = je.init_state(model, config)
    ids: dict[int, int] = {}
    events: list[je.EventRecord] = []
    found: dict[int, tuple[list[int], int, list[je.EventRecord]]] = {}
    step = 0
    while len(ids) < len(rows) or has_pending_work(state):
        for nth, row in enumerate(rows):
            if nth not in ids and (not arrivals or arrivals[nth % len(arrivals)] <= step):
                state, ids[nth] = begin(state, row)
        for request_id in ids.values():
            with contextlib.suppress(je.RequestStateError, ValueError):
                if drafts and step in drafts:
                    state = je.set_draft_tokens(state, request_id, drafts[step])
        plan = je.plan_step(state)
        if step in dropped and plan.outcome is je.StepOutcome.COMMITTED:
            je.execute(model, state, plan)
        if faults and step in faults:
            with (
                je.inject_fault(faults[step], je.RetryableStepError("again")),
                contextlib.suppress(je.RetryableStepError),
            ):
                state, _ = je.step(model, state)
        else:
            state, _ = je.step(model, state)
        je.check_invariants(state)
        state, new = je.drain(state, len(state.control.events))
        events += new
        for event in new:
            if event.finish_reason:
                found[event.request_id] = outcome(state, event.request_id, events)
                state = je.close_request(state, event.request_id)
        step += 1
        assert step < 200, "nobody goes on"
    return [found[ids[nth]] for nth in range(len(rows))]


def edited(
    sequence: Sequence[int], start: int, sampling: je.SamplingParams, eos: Collection[int] = ()
) -> np.ndarray:
    """float64[VOCAB], the logits that a token is chosen from by the rules in words.

    The minimum masks every EOS and stop id; the repetition penalty acts on prompt and output; then runs that would
    repeat are masked; presence and frequency count the output, from `start` on; the bias comes last.
    """
    logits, output = logits_after(sequence), list(sequence[start:])
    masked = set()
    if len(output) < sampling.min_new_tokens:
        masked |= set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    if size := sampling.no_repeat_ngram_size:
        masked |= repeated(sequence, size)
    for token in range(LETTERS):
        if token in sequence and sampling.repetition_penalty:
            positive = logits[token] > 0
            factor = sampling.repetition_penalty
            logits[token] = logits[token] / factor if positive else logits[token] * factor
        if token in output:
            logits[token] -= sampling.presence_penalty
        logits[token] -= sampling.frequency_penalty * output.count(token)
        logits[token] += dict(sampling.logit_bias).get(token, 0.0)
    logits[list(masked)] = -np.inf
    return logits


def repeated(sequence: Sequence[int], size: int) -> set[int]:
    """Ids that would complete a run of `size` that is there already."""
    runs = {tuple(sequence[i : i + size]) for i in range(len(sequence) - size + 1)}
    last = tuple(sequence[len(sequence) - size + 1 :]) if len(sequence) >= size - 1 else None
    return {run[-1] for run in runs if run[:-1] == last}


def distribution(logits: np.ndarray, sampling: je.SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Probabilities by temperature, top-k, the renormalised smallest head that reaches top-p, and min-p.

    With slack, ids that rounding might keep are kept.
    """
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = {t: np.exp((logits[t] - logits[order[0]]) / sampling.temperature) for t in order}
    kept = dict(list(best.items())[: sampling.top_k or None])
    total, reached, head = sum(kept.values()), 0.0, {}
    for token, weight in kept.items():
        if head and reached >= sampling.top_p + slack:
            break
        head[token] = weight
        reached += weight / total
    weights = [w if (w := head.get(t, 0.0)) >= sampling.min_p - slack else 0.0 for t in range(len(logits))]
    return np.array(weights) / sum(weights)
