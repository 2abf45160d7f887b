"""Grammars that bound what a turn may say; where a turn stands in its grammar is a value.

A `Cursor` is a grammar and the tokens accepted in this turn so far. The masks for its next tokens follow from it alone,
so a step that is dropped, tried again or forked has nothing to take back here. The library llguidance parses with
matchers that move; they serve as a cache only: one is kept for each of the latest cursors and never moves again, and a
cursor that goes on gets a copy, which costs a few microseconds whatever its length.

Generated text is bytes here, as `Tokenizer.piece` gives them inside a text. A tokenizer that drops a blank at the very
beginning of a text drops it from a turn that the grammar makes begin with one, too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import textwrap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from jaxengine.text import Tokenizer

T = TypeVar("T")

# Left to itself the library allows any run of blanks between the parts of JSON, so that a model could write blanks up
# to its limit. This spacing is that of `json.dumps`; being fixed, it is forced too.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACING_KEYS = {*_SPACING, "whitespace_pattern"}
# How many tokens a cursor may have moved on from a matcher that is still looked for: drafts and forced spans mostly.
_LOOKBACK = 64
_GRAMMARS = 256
_SPARE_MATCHERS = 64


class GuidanceError(ValueError):
    """A cursor has no next token: its tokens break the grammar, or the library gave the grammar up; that stays so.

    Attributes:
        cursor: The place of the cursor in the call, from 0.
    """

    def __init__(self, message: str, cursor: int = 0) -> None:
        super().__init__(message)
        self.cursor = cursor


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a turn may say, from one of the three constructors; equal grammars share what is compiled for them.

    Attributes:
        kind: The language that `text` is in.
        text: The schema as JSON, the regular expression or the Lark grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON that satisfies a schema, with properties in the schema's order.

        Without spacing in the schema's own `x-guidance` (the library's options), it is that of `json.dumps`: no line
        breaks, one blank after a comma or colon. So blanks between the parts of the JSON are bounded.

        Args:
            schema: A JSON schema, or its text.

        Raises:
            ValueError: It is no JSON schema, nothing satisfies it, or it asks for what the library can't enforce.
            ImportError: llguidance isn't installed.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            value = {} if value is True else value
            if not isinstance(value, Mapping):
                reason = "nothing satisfies false" if value is False else "it is no object"
                raise ValueError(reason)
            options = value.get("x-guidance", {})
            if isinstance(options, Mapping) and not _SPACING_KEYS & options.keys():
                value = {**value, "x-guidance": {**_SPACING, **options}}
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema can't be used: {error}") from error
        return _accepted(cls("json_schema", text))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole, in the syntax of Rust's `regex`, without look-around.

        Raises:
            ValueError: The pattern is empty, invalid, or matches nothing.
            ImportError: llguidance isn't installed.
        """
        return _accepted(cls("regex", _text("pattern", pattern)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that a Lark grammar, in the library's dialect, derives from its rule `start`.

        Special tokens appear only where the grammar names them, and those that end a turn only at its end.

        Raises:
            ValueError: The grammar is empty, invalid, incomplete, or matches nothing.
            ImportError: llguidance isn't installed.
        """
        return _accepted(cls("lark", _text("grammar", text)))


class Cursor(NamedTuple):
    """Where a turn stands in its grammar.

    Attributes:
        grammar: The turn's grammar.
        tokens: int32[accepted], the tokens generated in this turn.
        drafts: int32[drafts], tokens proposed to come next.
    """

    grammar: Grammar
    tokens: np.ndarray
    drafts: np.ndarray


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
        self._table = _library().LLTokenizer(self._vocabulary)
        self._vocabulary.greedy = self._table.greedy_tokenize
        self._eos_row = _bits(self._eos, vocab_size)
        self._plain_row = ~_bits([*self._eos, *range(len(self._vocabulary.tokens), vocab_size)], vocab_size)
        self._scratch = np.zeros(-(-self._table.vocab_size // 32), np.uint32)
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[Grammar, Any] = collections.OrderedDict()
        self._matchers: collections.OrderedDict[tuple[Grammar, bytes], Any] = collections.OrderedDict()
        self._capacity = _SPARE_MATCHERS

    def fill(self, cursors: Sequence[Cursor], out: np.ndarray) -> None:
        """Writes the masks of the next tokens.

        Each cursor has 1 + len(drafts) rows in order: after its tokens, after those and the first draft, and so on.
        Rows behind a draft that its mask refuses, or that ends the turn, hold the EOS ids. An EOS id is allowed
        exactly where the grammar may end; a row without any id is one where it can only end and there is no EOS id.
        Masks follow the tokenizer's own spelling: where the grammar forces text, they allow its next token only.

        Args:
            cursors: The cursors.
            out: uint32[rows, ceil(vocab_size / 32)]; bit b of word w stands for id 32w + b. Not to be used after an
                error.

        Raises:
            GuidanceError: A cursor, named by its place, can't go on, now or later; the others can.
                Anything else that is raised is of the moment, and the call may be repeated.
            ValueError: `out` has another shape or dtype.
        """
        shape = (sum(1 + len(cursor.drafts) for cursor in cursors), len(self._eos_row))
        if out.shape != shape or out.dtype != np.uint32:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; these cursors need uint32{list(shape)}")
        with self._lock:
            self._capacity = max(self._capacity, _SPARE_MATCHERS + 2 * len(cursors))
            row = 0
            for place, cursor in enumerate(cursors):
                rows = out[row : row + 1 + len(cursor.drafts)]
                self._settled(cursor.grammar, place, functools.partial(self._fill, cursor, rows))
                row += len(rows)

    def forced(self, grammar: Grammar, tokens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
        """The tokens that must come next after `tokens`, as the tokenizer spells the forced text; often none.

        A last token that a longer one could replace is left out, so appending them takes nothing from what may follow.

        Raises:
            GuidanceError: As in `fill`.
        """

        def work() -> tuple[int, ...]:
            return tuple(
                self._checked(self._matcher(grammar, tokens), lambda matcher: matcher.compute_ff_tokens())
            )

        with self._lock:
            forced = self._settled(grammar, 0, work)
        ends = [place for place, token in enumerate(forced) if token in self._eos]
        return forced[: ends[0]] if ends else forced

    def is_complete(self, grammar: Grammar, tokens: Sequence[int] | np.ndarray) -> bool:
        """Whether the turn may end after `tokens`.

        Raises:
            GuidanceError: As in `fill`.
        """

        def work() -> bool:
            return self._ends(self._matcher(grammar, tokens))

        with self._lock:
            return self._settled(grammar, 0, work)

    def _fill(self, cursor: Cursor, rows: np.ndarray) -> None:
        matcher = self._matcher(cursor.grammar, cursor.tokens)
        self._mask(matcher, rows[0])
        rows[1:] = self._eos_row
        if len(cursor.drafts):
            matcher = matcher.deep_copy()
        for place, draft in enumerate(cursor.drafts.tolist()):
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

    def _settled(self, grammar: Grammar, place: int, work: Callable[[], T]) -> T:
        """What `work` returns.

        Matchers of a grammar share their automaton, so an error may come from what others left in it, as its size.
        After one all of them are dropped; only what a fresh one says too is permanent.
        """
        for last in (False, True):
            try:
                return work()
            except GuidanceError as error:
                self._forget(grammar)
                if last:
                    raise GuidanceError(str(error), place) from error
            except BaseException:
                self._forget(grammar)
                raise
        raise AssertionError

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
            matcher = _library().LLMatcher(self._table, _source(grammar), log_level=0, limits=_limits())
            self._compiled[grammar] = self._checked(matcher, lambda matcher: matcher)
            if len(self._compiled) > _GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

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
            raise GuidanceError(f"the grammar can't go on: {_sentence(matcher.get_error())}")
        return result


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
            if self._spells(tokens, text):
                return tokens
            tokens = self.greedy(text)
            if not self._spells(tokens, text):
                raise GuidanceError(f"the tokenizer can't spell {text!r}, which the grammar forces")
            return tokens
        except BaseException as error:
            self.error = error
            return self.greedy(text)

    def _spells(self, tokens: list[int], text: str) -> bool:
        joined = b"".join(self.tokens[token] for token in tokens)
        return joined == text.encode() and self._special.isdisjoint(tokens)


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


def _accepted(grammar: Grammar) -> Grammar:
    """The grammar itself, compiled once for a vocabulary of bytes to see whether it has a first token."""
    library = _library()
    try:
        source = _source(grammar)
        failed, messages = library.LLMatcher.validate_grammar_with_warnings(source, limits=_limits())
        reason = messages[0] if failed else ""
        # A warning is about special tokens, which only the model's own tokenizer can judge.
        if not messages:
            matcher = library.LLMatcher(_byte_table(), source, log_level=0, limits=_limits())
            matcher.compute_bitmask()
            reason = matcher.get_error()
    except ValueError as error:
        reason = str(error)
    if reason:
        raise ValueError(f"the {_NAMES[grammar.kind]} can't be used: {_sentence(reason)}")
    return grammar


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own notation."""
    if grammar.kind == "regex":
        return _library().LLMatcher.grammar_from_regex(grammar.text)
    key, value = (
        ("json_schema", json.loads(grammar.text))
        if grammar.kind == "json_schema"
        else ("lark_grammar", grammar.text)
    )
    return json.dumps({"grammars": [{key: value}]})


@functools.cache
def _limits() -> Any:
    """Limits of a grammar; errors don't repeat it.

    The library counts symbols in 16 bits and panics beyond, after minutes for a large grammar; this refuses it in
    seconds.
    """
    return _library().LLParserLimits(verbose_errors=False, max_grammar_size=50_000)


@functools.cache
def _byte_table() -> Any:
    return _library().LLTokenizer("byte")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("grammars need the library llguidance; install jaxengine[guidance]") from error
    return llguidance


def _bits(tokens: Collection[int], vocab_size: int) -> np.ndarray:
    """uint32[ceil(vocab_size / 32)] with the bits of `tokens` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {name} is {value!r}; give a text")
    if not value:
        raise ValueError(f"the {name} is empty; give one that has something to say")
    return value


def _sentence(reason: str) -> str:
    """The library's reason on one line of bounded length, without its dump of the parser."""
    reason = textwrap.shorten(reason.partition("\n<")[0], 500)
    return "no text satisfies it" if reason == "NoExtensionBias" else reason
