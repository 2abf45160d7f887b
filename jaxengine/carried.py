"""What a request carries beside numbers: its settings, those of its turn, and tokens that were proposed for it.

One frozen value a request, in a column of its own beside the numeric ones. `Traits` says of each request which rare
things it asks for, so that steps without any pay nothing for them.
"""

from __future__ import annotations

import dataclasses
import enum

from jaxengine.events import TokenLogprobs
from jaxengine.grammars import Grammar
from jaxengine.proposers import NgramDrafts
from jaxengine.sampling_params import ResolvedSampling, SamplingParams
from jaxengine.text import TextState


class Traits(enum.IntFlag):
    """What a turn asks for that most don't."""

    NONE = 0
    EDITED = 1
    """Its logits are changed before a token is chosen: penalties, biases, forbidden repetitions."""
    OWN_ENDS = 2
    """Other tokens end it than the model's EOS tokens."""
    LOGPROBS = 4
    MINIMUM = 8
    """It has a least number of tokens."""
    GUIDED = 16
    """It follows a grammar."""
    TEXT = 32
    """Its events carry text, since the model has a tokenizer."""
    PROPOSES = 64
    """Its drafts come from its own text."""
    SCORED = 128
    """The log-probabilities of its prompt are reported."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn's settings.

    Attributes:
        sampling: How tokens are chosen.
        grammar: What they follow, or None.
        ends: Tokens that end it.
        start: Where its input begins in the sequence.
        stop: Where its input ends.
    """

    sampling: ResolvedSampling
    grammar: Grammar | None
    ends: frozenset[int]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Carried:
    """Beside the numbers of one request.

    Attributes:
        own: The request's settings, which a turn without its own goes by.
        own_grammar: Its grammar.
        proposer: Where its drafts come from, or None.
        turn: The newest turn; None before the first.
        text: Where the turn's text stands; None at its beginning.
        unshown: What of it is shown yet if the turn ends here.
        drafts: Tokens proposed to follow the sequence; empty for none.
        scores: Of the first tokens of the turn's input, as far as they are known; None where nothing predicts a token.
    """

    own: SamplingParams
    own_grammar: Grammar | None = None
    proposer: NgramDrafts | None = None
    turn: Turn | None = None
    text: TextState | None = None
    unshown: str = ""
    drafts: tuple[int, ...] = ()
    scores: tuple[TokenLogprobs | None, ...] = ()


def traits_of(carried: Carried, turn: Turn, *, minimum: bool, text: bool) -> Traits:
    """Which traits a turn has; `minimum`: it has a least number of tokens, `text`: its events carry text."""
    sampling = turn.sampling
    asked, traits = sampling.asked, Traits.MINIMUM if minimum else Traits.NONE
    penalties = (sampling.repetition_penalty != 1, asked.presence_penalty, asked.frequency_penalty)
    if any(penalties) or sampling.no_repeat_ngram_size or sampling.biases:
        traits |= Traits.EDITED
    if asked.ignore_eos or asked.stop_token_ids:
        traits |= Traits.OWN_ENDS
    if asked.logprobs is not None:
        traits |= Traits.LOGPROBS
    if asked.prompt_logprobs is not None:
        traits |= Traits.SCORED
    if turn.grammar is not None:
        traits |= Traits.GUIDED
    if carried.proposer is not None:
        traits |= Traits.PROPOSES
    return traits | Traits.TEXT if text else traits


def next_scored(carried: Carried) -> int:
    """Where in the sequence the next token of the turn's input is that gets a score; nothing predicts the first."""
    assert carried.turn is not None
    return max(carried.turn.start + len(carried.scores), 1)
