"""What a step's choices come to: which of them count, and where they end a turn.

A row with drafts has a choice behind each of its tokens. The choice behind a draft is the one that plain decoding
would make there, its own random numbers included, if the drafts before it are what was chosen. So the longest prefix of
drafts that equal the choices before them is accepted, and the choice behind it is the next token: whatever is proposed,
the outcome is that of plain decoding. For sampling this is the speculative sampling of Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding" (2023), where the proposal is one certain token: it is accepted
with its probability.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import numpy as np

from jaxengine.carried import Traits
from jaxengine.events import FinishReason, TokenLogprobs
from jaxengine.planning import StepPlan
from jaxengine.state import Control
from jaxengine.text import TextState, Tokenizer, stops


@dataclasses.dataclass(frozen=True, eq=False)
class Settled:
    """What becomes of a step's rows.

    Attributes:
        slots: int64[rows], how many of each row's tokens are committed.
        row: int64[choices], the row of the plan that each choice that counts belongs to, in order.
        place: int64[choices], where it is among the rows of logits.
        token: int32[choices].
        ends: bool[choices], whether it is a token that ends its turn and is not part of it.
        reason: int64[choices], the `FinishReason` of the turn that it ends.
        text: What each choice lets be shown, a string a choice; empty where no turn has text.
        stop: By choice, the stop string that it completes.
        texts: By row of the plan, where its text stands afterwards, and what of it is shown yet if it ends there.
        logprobs: By choice, where they are reported.
        forced: By row of the plan, tokens that its grammar forces next.
        incomplete: Choices that end their turns before the grammars do.
        scores: By row of the plan, of the next tokens of its turn's input.
    """

    slots: np.ndarray
    row: np.ndarray
    place: np.ndarray
    token: np.ndarray
    ends: np.ndarray
    reason: np.ndarray
    text: Sequence[str]
    stop: Mapping[int, str]
    texts: Mapping[int, tuple[TextState, str]]
    logprobs: Mapping[int, TokenLogprobs] = dataclasses.field(default_factory=dict)
    forced: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    incomplete: Set[int] = frozenset()
    scores: Mapping[int, tuple[TokenLogprobs | None, ...]] = dataclasses.field(default_factory=dict)


def settle(
    control: Control, plan: StepPlan, chosen: np.ndarray, usable: np.ndarray, tokenizer: Tokenizer | None
) -> Settled:
    """Settles the choices of a plan.

    Args:
        control: The control value that the plan was made from.
        plan: The plan.
        chosen: int32[rows of logits].
        usable: bool[rows of logits], whether there was a choice. A draft behind which there is none is not accepted,
            so that the next step meets it with everything before it said.
        tokenizer: Needed where a turn has text.
    """
    requests = control.requests
    starts = plan.first_choice
    counts = plan.samples.astype(np.int64)
    for i in np.flatnonzero(plan.num_drafts):
        drafts = requests.carried[plan.index[i]].drafts[: plan.num_drafts[i]]
        end = starts[i] + len(drafts)
        refused = (chosen[starts[i] : end] != drafts) | ~usable[starts[i] + 1 : end + 1]
        counts[i] += int(np.argmax(refused)) if refused.any() else len(drafts)
    row = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = starts[row] + nth
    token = chosen[place]

    index = plan.index[row]
    ends = np.isin(token, list(control.facts.eos_token_ids))
    for i in np.flatnonzero(requests.traits[index] & Traits.OWN_ENDS):
        ends[i] = int(token[i]) in requests.carried[index[i]].turn.ends
    limit, length = requests.max_generated[index], requests.length[index] + nth + 1
    reason = np.select(
        [
            ends,
            (limit > 0) & (requests.generated[index] + nth + 1 >= limit),
            length >= requests.max_session[index],
        ],
        [FinishReason.EOS, FinishReason.MAX_GENERATED_TOKENS, FinishReason.MAX_SESSION_TOKENS],
        FinishReason.NONE,
    )
    text, stop, texts = _texts(control, plan, tokenizer, row, token, ends, reason)
    # What comes behind the end of its turn doesn't count: as many turns had ended as at the row's first choice.
    ended = np.append(0, np.cumsum(reason != FinishReason.NONE))[:-1]
    kept = np.flatnonzero(ended == ended[np.searchsorted(row, row)])
    slots = plan.num_tokens - plan.num_drafts
    slots[plan.samples] += np.bincount(row[kept], minlength=len(counts))[plan.samples] - 1
    return Settled(
        slots=slots,
        row=row[kept],
        place=place[kept],
        token=token[kept],
        ends=ends[kept],
        reason=reason[kept],
        text=[text[i] for i in kept] if texts else (),
        stop={nth: stop[i] for nth, i in enumerate(kept.tolist()) if i in stop} if stop else {},
        texts=texts,
    )


def _texts(
    control: Control,
    plan: StepPlan,
    tokenizer: Tokenizer | None,
    row: np.ndarray,
    token: np.ndarray,
    ends: np.ndarray,
    reason: np.ndarray,
) -> tuple[list[str], dict[int, str], dict[int, tuple[TextState, str]]]:
    """The text that each choice releases, the stop strings completed, and each row's text; marks stops in `reason`."""
    text, stopped, texts = [""] * len(row), {}, {}
    for i in np.flatnonzero(control.requests.traits[plan.index] & Traits.TEXT):
        assert tokenizer is not None
        carried = control.requests.carried[plan.index[i]]
        strings = carried.turn.sampling.stop
        state = stops.start(tokenizer) if carried.text is None else carried.text
        for choice in range(*np.searchsorted(row, [i, i + 1])):
            if ends[choice]:
                text[choice] = stops.finish(tokenizer, state)
                break
            advance = stops.advance(tokenizer, strings, state, int(token[choice]))
            text[choice], state = advance.text, advance.state
            if advance.stop is not None:
                reason[choice], stopped[choice] = FinishReason.STOP_STRING, advance.stop
                break
            if reason[choice]:
                text[choice] += stops.finish(tokenizer, state)
                break
        texts[int(i)] = state, stops.finish(tokenizer, state)
    return text, stopped, texts
