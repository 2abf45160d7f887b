"""The control value after a step: blocks and places handed over, tokens appended, turns ended, events published.

Pure, and complete before the device write begins.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.carried import Traits
from jaxengine.drafts import most_drafts
from jaxengine.events import EngineErrorCode, EngineEventFlags, EventRecord, FinishReason, Usage
from jaxengine.faults import Stage, reach
from jaxengine.logs import LogTable
from jaxengine.planning import StepPlan
from jaxengine.proposers import propose
from jaxengine.requests import finish_turn, free_without, without_suspects
from jaxengine.settling import Settled
from jaxengine.state import (
    ACCEPTED,
    ADMISSIONS,
    DEFERRALS,
    DRAFTED,
    PREEMPTIONS,
    STEPS,
    Control,
    RequestStatus,
    replace_rows,
    row_of,
    rows_of,
)


def next_control(control: Control, plan: StepPlan, settled: Settled | None) -> Control:
    """Returns the control value after a step that ran `plan`; `settled` is None if it had no rows."""
    reach(Stage.BOOKKEEPING)
    index = rows_of(control, plan.request_ids)
    newcomers = int(plan.is_new.sum())
    slots = np.zeros(0, np.int64) if settled is None else settled.slots
    counters = control.counters.copy()
    first_order = counters[ADMISSIONS] + 1
    counters[[DEFERRALS, ADMISSIONS, STEPS]] += plan.deferred, newcomers, int(len(index) > 0)
    counters[DRAFTED] += plan.num_drafts.sum()
    counters[ACCEPTED] += np.where(plan.num_drafts > 0, slots - (plan.num_tokens - plan.num_drafts), 0).sum()
    requests = control.requests
    order = requests.order[index]
    order[plan.is_new] = first_order + np.arange(newcomers)
    first_choice = np.where(plan.is_new, -1, requests.settled[index])
    kept = _kept(control, index, plan, slots)
    control = control.replace(  # type: ignore[attr-defined]
        blocks=_with_reserved(control, index, plan, kept),
        free_blocks=_without_reserved(control, plan, kept),
        counters=counters,
        suspects=without_suspects(control.suspects, plan.request_ids.tolist()),
    )
    control = replace_rows(
        control,
        index,
        status=RequestStatus.ACTIVE,
        place=plan.places,
        bank=1 - requests.bank[index],
        order=order,
        admitted=np.where(plan.is_new, counters[STEPS], requests.admitted[index]),
        queued=np.where(plan.is_new, requests.served[index], requests.queued[index]),
        settled=np.where(plan.samples & (first_choice < 0), counters[STEPS], first_choice),
        served=counters[STEPS],
        processed=plan.past + slots,
        failures=0,
    )
    control = _without_drafts(control, index[plan.samples])
    if len(plan.evicted):
        control = _without_residence(control, rows_of(control, plan.evicted))
    reach(Stage.EVENTS)
    if settled is not None:
        control = _with_tokens(control, index, settled)
        control = _with_carried(control, index, settled)
    for request_id in plan.unserviceable:
        control = finish_turn(
            control,
            row_of(control, int(request_id)),
            FinishReason.FAILED,
            EngineErrorCode.REQUEST_UNSERVICEABLE,
            f"request {request_id} needs more blocks than the pool of {control.num_blocks} has; "
            "close it and use a larger EngineConfig.num_blocks",
        )
    return control


def _without_residence(control: Control, rows: np.ndarray) -> Control:
    """Takes blocks and places back; a live turn waits again, and what it has so far becomes input to run once more."""
    requests = control.requests
    live = rows[requests.status[rows] != RequestStatus.TURN_COMPLETE]
    counters = control.counters.copy()
    counters[PREEMPTIONS] += len(live)
    control = control.replace(  # type: ignore[attr-defined]
        blocks=control.blocks.clear_rows(rows),
        free_blocks=free_without(control, rows),
        counters=counters,
    )
    control = replace_rows(control, rows, place=-1, order=-1, processed=0)
    return replace_rows(control, live, status=RequestStatus.QUEUED, input_end=requests.length[live])


def _kept(control: Control, index: np.ndarray, plan: StepPlan, slots: np.ndarray) -> np.ndarray:
    """int64[rows], reserved blocks that each row keeps: those for drafts only as far as they are accepted."""
    kept = plan.num_reserved.copy()
    drafted = np.flatnonzero(plan.num_drafts)
    if len(drafted):
        rows = index[drafted]
        slots_needed = np.maximum(plan.past[drafted] + slots[drafted], control.requests.length[rows])
        needed = blocks_for(slots_needed, control.config.block_size) - control.blocks_held[rows]
        kept[drafted] = np.minimum(kept[drafted], np.maximum(needed, 0))
    return kept


def _with_reserved(control: Control, index: np.ndarray, plan: StepPlan, kept: np.ndarray) -> LogTable:
    table = control.blocks
    starts = np.cumsum(plan.num_reserved) - plan.num_reserved
    one = kept == 1
    table = table.append_each(index[one], plan.reserved[starts[one]])
    for i in np.flatnonzero(kept > 1):
        table = table.extend(int(index[i]), plan.reserved[starts[i] : starts[i] + kept[i]])
    return table


def _without_reserved(control: Control, plan: StepPlan, kept: np.ndarray) -> np.ndarray:
    """The pool without the blocks that rows keep; the others are the next to be handed out."""
    left = control.free_blocks[: len(control.free_blocks) - len(plan.reserved)]
    if np.array_equal(kept, plan.num_reserved):
        return left
    nth = np.arange(len(plan.reserved)) - np.repeat(
        np.cumsum(plan.num_reserved) - plan.num_reserved, plan.num_reserved
    )
    unused = plan.reserved[nth >= np.repeat(kept, plan.num_reserved)]
    return np.concatenate([left, unused[::-1]])


def _without_drafts(control: Control, rows: np.ndarray) -> Control:
    """Proposals follow a sequence that has grown, so they are used up, whether they ran or not."""
    rows = rows[control.requests.num_drafts[rows] > 0]
    if len(rows) == 0:
        return control
    carried = control.requests.carried.copy()
    for row in rows:
        carried[row] = dataclasses.replace(carried[row], drafts=())
    control = replace_rows(control, rows, num_drafts=0)
    return control.replace(requests=control.requests.replace(carried=carried))  # type: ignore[attr-defined]


def _with_tokens(control: Control, index: np.ndarray, settled: Settled) -> Control:
    """Appends the choices that count, ends the turns that they end, and publishes the events in order."""
    rows = index[settled.row]
    grown = rows[~settled.ends]
    requests = control.requests
    length, generated, undrained = (
        requests.length.copy(),
        requests.generated.copy(),
        requests.undrained.copy(),
    )
    np.add.at(length, grown, 1)
    np.add.at(undrained, rows, 1)
    # What an event counts is up to its own token.
    nth = np.arange(len(rows)) - np.searchsorted(settled.row, settled.row)
    counted = generated[rows] + nth + ~settled.ends
    np.add.at(generated, grown, 1)
    control = control.replace(tokens=_appended(control.tokens, grown, settled.token[~settled.ends]))  # type: ignore[attr-defined]
    control = replace_rows(
        control, rows, length=length[rows], generated=generated[rows], undrained=undrained[rows]
    )
    done = settled.reason != FinishReason.NONE
    control = replace_rows(control, rows[done], status=RequestStatus.TURN_COMPLETE)
    columns = (requests.id, requests.turn, requests.prompt_tokens)
    # A turn's first event tells of its input.
    prompts = {
        nth: (*requests.carried[rows[nth]].scores, *settled.scores.get(int(settled.row[nth]), ()))
        or (None,) * int(requests.prompt_tokens[rows[nth]])
        for nth in np.flatnonzero(requests.traits[rows] & Traits.SCORED).tolist()
        if counted[nth] - (not settled.ends[nth]) == 0
    }
    text = settled.text or itertools.repeat("")
    events = [
        EventRecord(
            request_id=request_id,
            turn_id=turn,
            flags=_TOKEN_FLAGS[ends, reason != FinishReason.NONE],
            token=-1 if ends else token,
            finish_reason=_REASONS[reason],
            usage=Usage(prompt_tokens, generated_tokens),
            text=shown,
            stop=settled.stop.get(nth, ""),
            logprobs=settled.logprobs.get(nth),
            prompt_logprobs=prompts.get(nth, ()),
        )
        for nth, (token, reason, ends, generated_tokens, shown, request_id, turn, prompt_tokens) in enumerate(
            zip(
                settled.token.tolist(),
                settled.reason.tolist(),
                settled.ends.tolist(),
                counted.tolist(),
                text,
                *(column[rows].tolist() for column in columns),
                strict=False,
            )
        )
    ]
    for place in settled.incomplete:
        flags = events[place].flags | EngineEventFlags.GRAMMAR_INCOMPLETE
        events[place] = dataclasses.replace(events[place], flags=flags)
    return control.replace(events=(*control.events, *events))  # type: ignore[attr-defined]


def _with_carried(control: Control, index: np.ndarray, settled: Settled) -> Control:
    """Keeps where texts stand, and proposes what follows, as far as the limits leave room for it."""
    requests = control.requests
    going_on = np.setdiff1d(settled.row, settled.row[settled.reason != FinishReason.NONE])
    proposing = going_on[requests.traits[index[going_on]] & Traits.PROPOSES > 0]
    if not (settled.texts or settled.forced or settled.scores or len(proposing)):
        return control
    carried, num_drafts = requests.carried.copy(), requests.num_drafts.copy()
    for i, scores in settled.scores.items():
        carried[index[i]] = dataclasses.replace(
            carried[index[i]], scores=(*carried[index[i]].scores, *scores)
        )
    for i, (text, unshown) in settled.texts.items():
        carried[index[i]] = dataclasses.replace(carried[index[i]], text=text, unshown=unshown)
    drafts = dict(settled.forced)
    for i in proposing.tolist():
        tokens = control.tokens.read(index[i], 0, int(requests.length[index[i]]))
        # What a grammar forces is certain.
        drafts[i] = drafts.get(i) or propose(
            carried[index[i]].proposer, tokens, most_drafts(control, index[i])
        )
    for i, proposed in drafts.items():
        row = index[i]
        kept = proposed[: most_drafts(control, row)]
        num_drafts[row], carried[row] = len(kept), dataclasses.replace(carried[row], drafts=kept)
    columns = requests.replace(carried=carried, num_drafts=num_drafts)  # type: ignore[attr-defined]
    return control.replace(requests=columns)  # type: ignore[attr-defined]


def _appended(tokens: LogTable, rows: np.ndarray, values: np.ndarray) -> LogTable:
    """Appends `values[i]` to row `rows[i]`; the entries of a row are next to each other, in order."""
    distinct, starts, counts = np.unique(rows, return_index=True, return_counts=True)
    one = counts == 1
    tokens = tokens.append_each(distinct[one], values[starts[one]])
    for row, start, count in zip(distinct[~one], starts[~one], counts[~one], strict=True):
        tokens = tokens.extend(int(row), values[start : start + count])
    return tokens


# Looking enumerations up is much of the time of a step of thousands of rows.
_REASONS = list(FinishReason)
_TOKEN_FLAGS = {
    (False, False): EngineEventFlags.TOKEN,
    (False, True): EngineEventFlags.TOKEN | EngineEventFlags.TURN_FINISHED,
    (True, True): EngineEventFlags.TURN_FINISHED,
}
