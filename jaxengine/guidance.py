"""Grammars that bound what a turn may say; where a turn stands in its grammar is a value.

A cursor is a grammar and the tokens accepted in this turn so far. The masks for its next tokens follow from it alone,
so a step that is dropped, tried again or forked has nothing to take back here. The library llguidance parses with
matchers that move; they serve as a cache only: one is kept for each of the latest cursors and never moves again, and a
cursor that goes on gets a copy, which costs a few microseconds whatever its length.

Generated text is bytes here, as `Tokenizer.piece` gives them inside a text. A tokenizer that drops a blank at the very
beginning of a text drops it from a turn that the grammar makes begin with one, too.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxengine.grammars import (
    BYTES,
    ENDLESS,
    MOST_FORCED_BYTES,
    Grammar,
    byte_scout,
    forced_bytes,
    library,
    limits,
    may_force_endlessly,
    one_line,
    source,
    source_without_forcing,
)
from jaxengine.text import Tokenizer

__all__ = ["Grammar", "GuidanceError", "Guides"]

T = TypeVar("T")

# How many tokens a cursor may have moved on from a matcher that is still looked for: drafts and forced spans mostly.
_LOOKBACK = 64
_GRAMMARS = 256
_SPARE_MATCHERS = 64


class GuidanceError(ValueError):
    """A cursor has no next token: its tokens break the grammar, or the library gave the grammar up; that stays so."""


class Guides:
    """The masks of a model's grammars. Tables and compiled grammars are shared; calls may come from any thread.

    Building one reads the whole vocabulary, which takes a good part of a second.

    Args:
        tokenizer: The model's tokenizer.
        eos_token_ids: The ids that end a turn; there may be none.
        vocab_size: Width of the logits.

    Raises:
        ValueError: The tokenizer or an EOS id is too large for the logits.
        ImportError: llguidance isn't installed.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int], vocab_size: int) -> None:
        tokenizer.require_fits(vocab_size)
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"EOS id {token} is outside the {vocab_size} logits; correct the model's EOS ids"
                )
        self.vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._vocabulary = _Vocabulary(tokenizer, self._eos)
        self._table = library().LLTokenizer(self._vocabulary)
        self._vocabulary.greedy = self._table.greedy_tokenize
        self._eos_row = _bits(self._eos, vocab_size)
        self._plain_row = ~_bits([*self._eos, *range(len(self._vocabulary.tokens), vocab_size)], vocab_size)
        self._scratch = np.zeros(-(-self._table.vocab_size // 32), np.uint32)
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[Grammar, Any] = collections.OrderedDict()
        self._matchers: collections.OrderedDict[tuple[Grammar, bytes], Any] = collections.OrderedDict()
        self._capacity = _SPARE_MATCHERS

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a turn."""
        return self._eos

    def make_room(self, turns: int) -> None:
        """Keeps the matchers of so many turns from now on, at least: with fewer, each step would parse turns anew."""
        with self._lock:
            self._capacity = max(self._capacity, _SPARE_MATCHERS + 2 * turns)

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar ahead of its first mask, which can take a while.

        Raises:
            GuidanceError: No turn can begin under it with this tokenizer.
        """
        self.fill(grammar, (), (), np.empty((1, len(self._eos_row)), np.uint32))

    def fill(
        self,
        grammar: Grammar,
        tokens: Sequence[int] | np.ndarray,
        drafts: Sequence[int] | np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Writes the masks of a turn's next tokens: after `tokens`, after those and the first draft, and so on.

        Rows behind a draft that its mask refuses, or that ends the turn, hold the EOS ids. Those behind a draft that
        the grammar has no token to follow are empty, so that it is not accepted: if it is chosen all the same, the
        next call raises. An EOS id is allowed exactly where the grammar may end; a first row without any id is one
        where it can only end and there is no EOS id.
        Masks follow the tokenizer's own spelling: where the grammar forces text, they allow its next token only.

        Args:
            grammar: The turn's grammar.
            tokens: int32[accepted], the tokens generated in this turn.
            drafts: int32[drafts], tokens proposed to come next.
            out: uint32[1 + drafts, ceil(vocab_size / 32)]; bit b of word w stands for id 32w + b. Not to be used after
                an error.

        Raises:
            GuidanceError: The turn can't go on, now or later; others can.
                Anything else that is raised is of the moment, and the call may be repeated.
            ValueError: `out` has another shape or dtype.
        """
        shape = 1 + len(drafts), len(self._eos_row)
        if out.shape != shape or out.dtype != np.uint32:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; this turn needs uint32{list(shape)}")
        proposed = [int(draft) for draft in drafts]
        with self._lock:
            for kept in range(len(proposed), -1, -1):
                try:
                    self._settled(
                        grammar, functools.partial(self._fill, grammar, tokens, proposed[:kept], out)
                    )
                except GuidanceError:
                    # Perhaps it is a draft behind which nothing can follow.
                    if kept == 0:
                        raise
                else:
                    if kept < len(proposed):
                        out[kept + 1 :] = 0
                    return

    def forced(self, grammar: Grammar, tokens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """The tokens that must come next after `tokens`, as the tokenizer spells the forced text; often none.

        A last token that a longer one could replace is left out, so appending them takes nothing from what may follow.

        Raises:
            GuidanceError: As in `fill`.
        """
        with self._lock:
            forced = self._settled(
                grammar,
                lambda: self._checked(
                    self._matcher(grammar, tokens), lambda matcher: matcher.compute_ff_tokens()
                ),
            )
        ends = [place for place, token in enumerate(forced) if token in self._eos]
        return tuple(forced[: ends[0]] if ends else forced)

    def is_complete(self, grammar: Grammar, tokens: Sequence[int] | np.ndarray, stop: str = "") -> bool:
        """Whether the grammar may end after `tokens`, or with `stop` after the text before that.

        Args:
            grammar: The turn's grammar.
            tokens: int32[accepted], the tokens generated in this turn.
            stop: A string that the last of the tokens completes.

        Raises:
            GuidanceError: As in `fill`.
        """
        with self._lock:
            if stop:
                tokens = self._vocabulary.before(np.asarray(tokens).tolist(), stop)
            return self._settled(grammar, lambda: self._ends(self._matcher(grammar, tokens)))

    def _fill(
        self, grammar: Grammar, tokens: Sequence[int] | np.ndarray, drafts: list[int], rows: np.ndarray
    ) -> None:
        matcher = self._matcher(grammar, tokens)
        self._mask(matcher, rows[0])
        rows[1:] = self._eos_row
        if drafts:
            matcher = matcher.deep_copy()
        for place, draft in enumerate(drafts):
            if draft in self._eos or not self._allows(rows[place], draft):
                break
            self._consume(matcher, [draft])
            self._mask(matcher, rows[place + 1])

    def _mask(self, matcher: Any, row: np.ndarray) -> None:
        """Writes one mask."""
        scratch = self._scratch
        self._checked(
            matcher, lambda matcher: matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        )
        # The library ends a text with an id of its own, behind the vocabulary, which is dropped here.
        words = min(len(row), len(scratch))
        row[:] = 0
        row[:words] = scratch[:words]
        row &= self._plain_row
        if self._ends(matcher):
            row |= self._eos_row
        elif not row.any():
            raise GuidanceError("the grammar needs a token that it can't have; correct the grammar")

    def _ends(self, matcher: Any) -> bool:
        """Whether the grammar may end."""
        return self._checked(matcher, lambda matcher: matcher.is_accepting())

    def _allows(self, row: np.ndarray, token: int) -> bool:
        return 0 <= token < 32 * len(row) and bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def _settled(self, grammar: Grammar, work: Callable[[], T]) -> T:
        """What `work` returns.

        Matchers of a grammar share their automaton, so an error may come from what others left in it, as its size.
        After one all of them are dropped; only what a fresh one says too is permanent.
        """
        try:
            return self._unspoilt(grammar, work)
        except GuidanceError:
            return self._unspoilt(grammar, work)

    def _unspoilt(self, grammar: Grammar, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException:
            self._forget(grammar)
            raise

    def _forget(self, grammar: Grammar) -> None:
        self._compiled.pop(grammar, None)
        for key in [key for key in self._matchers if key[0] == grammar]:
            del self._matchers[key]

    def _matcher(self, grammar: Grammar, tokens: Sequence[int] | np.ndarray) -> Any:
        """The matcher after `tokens`, which must not be moved on."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        for known in range(len(tokens), max(len(tokens) - _LOOKBACK, 0), -1):
            key = grammar, tokens[:known].tobytes()
            if key in self._matchers:
                self._matchers.move_to_end(key)
                matcher = self._matchers[key]
                break
        else:
            known, matcher = 0, self._compile(grammar)
        if known < len(tokens):
            matcher = matcher.deep_copy()
            self._consume(matcher, tokens[known:].tolist())
            self._matchers[grammar, tokens.tobytes()] = matcher
            while len(self._matchers) > self._capacity:
                self._matchers.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> Any:
        """The matcher before the first token."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._checked(self._fresh(grammar), lambda matcher: matcher)
            if len(self._compiled) > _GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _fresh(self, grammar: Grammar) -> Any:
        def compiled(text: str) -> Any:
            return library().LLMatcher(self._table, text, log_level=0, limits=limits())

        if not may_force_endlessly(grammar):
            return compiled(source(grammar))
        # Masks of bytes cost next to nothing, but know no special tokens, of which the library warns.
        _, warnings = library().LLMatcher.validate_grammar_with_warnings(source(grammar), limits=limits())
        scout = compiled(source_without_forcing(grammar)) if warnings else byte_scout(grammar)
        scout = self._checked(scout, lambda scout: scout)
        ahead = _require_end(scout, self._vocabulary.tokens if warnings else BYTES)
        return _Scouted(
            compiled(source(grammar)), scout, ahead, self._vocabulary.tokens, in_bytes=not warnings
        )

    def _consume(self, matcher: Any, tokens: list[int]) -> None:
        for token in tokens:
            if token in self._eos or not 0 <= token < len(self._vocabulary.tokens):
                raise GuidanceError(f"the turn holds token {token}, which no grammar allows; take it back")
        self._checked(matcher, lambda matcher: matcher.consume_tokens(tokens))

    def _checked(self, matcher: Any, call: Callable[[Any], T]) -> T:
        """What the call returns; the library itself raises nothing and would give a mask of EOS ids instead."""
        result = call(matcher)
        error, self._vocabulary.error = self._vocabulary.error, None
        if error is not None:
            raise error
        if matcher.is_error():
            raise GuidanceError(one_line(matcher.get_error()))
        return result


class _Scouted:
    """A matcher of a grammar that may force text without end, at which the library would never return.

    A second one, the scout, goes ahead of it.
    """

    def __init__(
        self, matcher: Any, scout: Any, ahead: int, pieces: Sequence[bytes], *, in_bytes: bool
    ) -> None:
        self._matcher, self._scout, self._ahead = matcher, scout, ahead
        self._pieces, self._in_bytes = pieces, in_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> _Scouted:
        matcher, scout = self._matcher.deep_copy(), self._scout.deep_copy()
        return _Scouted(matcher, scout, self._ahead, self._pieces, in_bytes=self._in_bytes)

    def consume_tokens(self, tokens: list[int]) -> bool:
        """As the matcher's own; raises GuidanceError where the text behind the tokens has no end."""
        text = b"".join(self._pieces[token] for token in tokens)
        if not self._scout.consume_tokens(list(text) if self._in_bytes else tokens):
            raise GuidanceError(one_line(self._scout.get_error()))
        # Within text that was found to be forced there is nothing new.
        self._ahead -= len(text)
        if self._ahead <= 0:
            self._ahead = _require_end(self._scout, BYTES if self._in_bytes else self._pieces)
        return bool(self._matcher.consume_tokens(tokens))


def _require_end(scout: Any, pieces: Sequence[bytes]) -> int:
    """The bytes that are forced next; raises GuidanceError if there is no end of them."""
    length = forced_bytes(scout.deep_copy(), pieces)
    if length > MOST_FORCED_BYTES:
        raise GuidanceError(ENDLESS)
    return length


class _Vocabulary:
    """The tokenizer as the library takes it: each token's bytes, and how forced text is spelled.

    The library could read `tokenizer.json` by itself, but only of some kinds, and it takes every added token in angle
    brackets for a special one.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int]) -> None:
        pieces = [tokenizer.piece(token, first=False) for token in range(tokenizer.vocab_size)]
        special = {token for token in eos if token < len(pieces)} | tokenizer.special_tokens.keys()
        for token in special:
            pieces[token] = tokenizer.special_tokens.get(token, f"<eos {token}>").encode()
        self.tokens = [piece or b"" for piece in pieces]
        self.special_token_ids = sorted(special)
        self.greedy: Callable[[str], list[int]] = lambda text: []
        self.error: BaseException | None = None
        self._special = special
        self._encode = tokenizer.encode_within
        self._encode("")  # what it builds at first, it builds now and not while a turn waits

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the text; what goes wrong is kept in `error`, since the library would panic at it."""
        try:
            tokens = self._encode(text)
            if self._spells(tokens, text.encode()):
                return tokens
            tokens = self.greedy(text)
            if not self._spells(tokens, text.encode()):
                raise GuidanceError(f"the tokenizer can't spell {text!r}, which the grammar forces")
            return tokens
        except BaseException as error:
            self.error = error
            return self.greedy(text)

    def before(self, tokens: list[int], stop: str) -> list[int]:
        """Tokens that spell the text before a stop string that the last of `tokens` completes."""
        pieces = [b"" if token in self._special else self.tokens[token] for token in tokens]
        text, wanted = b"".join(pieces), stop.encode()
        end = text.find(wanted, max(len(text) - len(pieces[-1]) - len(wanted) + 1, 0))
        lengths = list(itertools.accumulate(map(len, pieces), initial=0))
        # A token that the stop string cuts is spelled otherwise, from the border of a character on.
        for kept in range(bisect.bisect_right(lengths, end) - 1, -1, -1):
            rest = text[lengths[kept] : end]
            spelled = self.greedy(rest.decode(errors="replace"))
            if self._spells(spelled, rest):
                return [*tokens[:kept], *spelled]
        raise GuidanceError(f"the tokenizer can't spell what comes before {stop!r}")

    def _spells(self, tokens: list[int], text: bytes) -> bool:
        joined = b"".join(self.tokens[token] for token in tokens)
        return joined == text and self._special.isdisjoint(tokens)


def _bits(tokens: Collection[int], vocab_size: int) -> np.ndarray:
    """uint32[ceil(vocab_size / 32)] with the bits of `tokens` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
