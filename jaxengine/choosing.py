"""What each row of logits is chosen by: its request's settings, what they make of its sequence, and its grammar's mask.

A row with drafts has several rows of logits, each with the sequence up to its own draft. All of this is worked out on
the host while the device makes the logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxengine.carried import Carried, Traits, Turn
from jaxengine.errors import RequestFailure, RetryableStepError
from jaxengine.events import FinishReason
from jaxengine.guidance import GuidanceError, Guides
from jaxengine.planning import StepPlan
from jaxengine.programs import Bucket, padded, power_of_two
from jaxengine.sampling import Edits, SamplingRows
from jaxengine.settling import Settled
from jaxengine.state import Control

_SHORTEST_HISTORY, _FEWEST_BIASES = 64, 16
_CHANGED = Traits.EDITED | Traits.MINIMUM | Traits.GUIDED
_ALL = np.uint32(0xFFFFFFFF)


def sampling_rows(control: Control, plan: StepPlan, bucket: Bucket) -> SamplingRows:
    """The settings of a plan's rows of logits, padded to the bucket; rows that choose nothing take the arg-max."""
    row = np.repeat(np.arange(len(plan.index)), plan.num_logits)
    requests, index = control.requests, plan.index[row]
    position = plan.past[row] + (plan.logits_index - plan.offsets[row]) + 1
    chooses = plan.samples[row] & (np.arange(len(row)) >= plan.first_choice[row])
    return SamplingRows(
        temperature=padded(requests.temperature[index] * chooses, bucket.logits),
        top_k=padded(requests.top_k[index], bucket.logits),
        top_p=padded(requests.top_p[index], bucket.logits),
        min_p=padded(requests.min_p[index], bucket.logits),
        seed=padded(requests.seed[index], bucket.logits),
        position=padded(position.astype(np.int32), bucket.logits),
    )


def edits_of(control: Control, plan: StepPlan, bucket: Bucket, guides: Guides | None) -> Edits | None:
    """What changes a plan's logits before tokens are chosen, padded to the bucket; None if nothing does.

    Raises:
        RequestFailure: A grammar can't go on, or allows nothing that the other settings leave.
        RetryableStepError: A mask could not be made for now.
    """
    traits = control.requests.traits[plan.index] * plan.samples
    changed = np.flatnonzero(traits & _CHANGED)
    if len(changed) == 0:
        return None
    rows = [_Row(control, plan, int(i)) for i in changed]
    allowed = np.full((bucket.logits, -(-control.facts.vocab_size // 32)), _ALL)
    edits = Edits(
        repetition=np.ones(bucket.logits, np.float32),
        presence=np.zeros(bucket.logits, np.float32),
        frequency=np.zeros(bucket.logits, np.float32),
        history=np.full((bucket.logits, _longest(rows)), -1, np.int32),
        output_from=np.zeros(bucket.logits, np.int32),
        bias_ids=np.full((bucket.logits, _most_biases(rows)), -1, np.int32),
        bias=np.zeros((bucket.logits, _most_biases(rows)), np.float32),
        allowed=allowed,
    )
    starts = plan.first_choice
    if guides is not None:
        guides.make_room(sum(row.turn.grammar is not None for row in rows))
    for i, row in zip(changed, rows, strict=True):
        places = slice(int(starts[i]), int(starts[i]) + 1 + row.num_drafts)
        if row.turn.grammar is not None:
            assert guides is not None, "begin_turn refuses a grammar without a tokenizer"
            _guide(row, int(plan.request_ids[i]), guides, allowed[places])
        for nth in range(1 + row.num_drafts):
            _edit(row, nth, edits, places.start + nth)
            _forbid(row, nth, allowed[places.start + nth])
        # Behind a draft this is left to the step that begins there.
        if row.turn.grammar is not None and not allowed[places.start].any():
            request_id = int(plan.request_ids[i])
            raise RequestFailure(
                f"request {request_id} has no token left: its grammar allows none that min_new_tokens, "
                "no_repeat_ngram_size and stop_token_ids leave; relax one of them",
                (request_id,),
            )
    return edits


class _Row:
    """A row of the plan whose logits are changed."""

    def __init__(self, control: Control, plan: StepPlan, i: int) -> None:
        requests, row = control.requests, plan.index[i]
        self.turn = _turn(control, plan, i)
        self.length = int(requests.length[row])
        self.generated = int(requests.generated[row])
        self.least = int(requests.least[row])
        self.num_drafts = int(plan.num_drafts[i])
        drafts = requests.carried[row].drafts[: self.num_drafts]
        self.tokens = np.append(control.tokens.read(row, 0, self.length), np.array(drafts, np.int32))

    @property
    def penalises(self) -> bool:
        """Whether its logits depend on how often tokens are in its sequence."""
        asked = self.turn.sampling.asked
        return bool(
            self.turn.sampling.repetition_penalty != 1 or asked.presence_penalty or asked.frequency_penalty
        )


def _turn(control: Control, plan: StepPlan, i: int) -> Turn:
    carried: Carried = control.requests.carried[plan.index[i]]
    assert carried.turn is not None, "a row that runs has begun a turn"
    return carried.turn


def _longest(rows: list[_Row]) -> int:
    """Room for each history: powers of two, so that few programs are compiled."""
    lengths = [len(row.tokens) for row in rows if row.penalises]
    return power_of_two(max([_SHORTEST_HISTORY, *lengths]))


def _most_biases(rows: list[_Row]) -> int:
    return power_of_two(max([_FEWEST_BIASES, *(len(row.turn.sampling.biases) for row in rows)]))


def _guide(row: _Row, request_id: int, guides: Guides, allowed: np.ndarray) -> None:
    """Writes the masks of a row's grammar, uint32[1 + drafts, words]."""
    assert row.turn.grammar is not None
    output = row.tokens[row.length - row.generated :]
    try:
        with mask_failures_of(request_id):
            guides.fill(row.turn.grammar, output[: row.generated], output[row.generated :], allowed)
    except GuidanceError as error:
        raise RequestFailure(
            f"the grammar of request {request_id} can't go on: {error}", (request_id,)
        ) from error
    for mask in allowed:
        # A grammar knows the model's EOS tokens; the turn's own ends come where those may, and nowhere else.
        may_end = any(mask[token // 32] >> token % 32 & 1 for token in guides.eos_token_ids)
        change = _set if may_end else _clear
        change(mask, row.turn.ends)


@contextlib.contextmanager
def mask_failures_of(request_id: int) -> Iterator[None]:
    """Raises what goes wrong inside for the moment as a `RetryableStepError` that names the request."""
    try:
        yield
    except (GuidanceError, MemoryError):
        raise
    except Exception as error:
        raise RetryableStepError(
            f"the mask of request {request_id} could not be made: {error}", (request_id,)
        ) from error


def _edit(row: _Row, nth: int, edits: Any, place: int) -> None:
    """Writes what changes the logits behind the `nth` draft of a row."""
    sampling, end = row.turn.sampling, row.length + nth
    asked = sampling.asked
    if row.penalises:
        edits.repetition[place] = sampling.repetition_penalty
        edits.presence[place], edits.frequency[place] = asked.presence_penalty, asked.frequency_penalty
        edits.history[place, :end] = row.tokens[:end]
        edits.output_from[place] = row.length - row.generated
    for column, (token, bias) in enumerate(sampling.biases):
        edits.bias_ids[place, column], edits.bias[place, column] = token, bias


def _forbid(row: _Row, nth: int, mask: np.ndarray) -> None:
    """Takes out of the mask behind the `nth` draft what comes too early or again."""
    if row.generated + nth < row.least:
        _clear(mask, row.turn.ends)
    if size := row.turn.sampling.no_repeat_ngram_size:
        _clear(mask, repeating(row.tokens[: row.length + nth], size).tolist())


def repeating(tokens: np.ndarray, size: int) -> np.ndarray:
    """The ids that would make a run of `size` tokens come twice in `tokens`, if they followed."""
    if len(tokens) < size:
        return tokens[:0]
    runs = np.lib.stride_tricks.sliding_window_view(tokens, size)
    same = (runs[:, :-1] == tokens[len(tokens) - size + 1 :]).all(axis=1)
    return np.unique(runs[same, -1])


def _set(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)


def _clear(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << token % 32)


def with_grammars(control: Control, plan: StepPlan, settled: Settled, guides: Guides | None) -> Settled:
    """Adds the tokens that grammars force next, which follow as drafts, and which turns end before their grammars do.

    A grammar that can't go on is met by the next step; at the end of a turn it counts as incomplete.

    Raises:
        RetryableStepError: This could not be told for now.
    """
    assert guides is not None
    forced, incomplete = {}, set()
    for i in np.flatnonzero(control.requests.traits[plan.index] & Traits.GUIDED):
        choices = np.flatnonzero(settled.row == i)
        if len(choices) == 0:
            continue
        row, last = plan.index[i], int(choices[-1])
        reason = settled.reason[last]
        if reason == FinishReason.EOS:
            continue
        length, generated = int(control.requests.length[row]), int(control.requests.generated[row])
        output = np.append(control.tokens.read(row, length - generated, length), settled.token[choices])
        grammar = control.requests.carried[row].turn.grammar
        complete = False
        with contextlib.suppress(GuidanceError), mask_failures_of(int(plan.request_ids[i])):
            if reason == FinishReason.NONE:
                forced[int(i)] = guides.forced(grammar, output)
            else:
                complete = guides.is_complete(grammar, output, settled.stop.get(last, ""))
        if reason != FinishReason.NONE and not complete:
            incomplete.add(last)
    return dataclasses.replace(settled, forced=forced, incomplete=incomplete)
