"""Guides of toy tokenizers, their masks, and turns that a model of chance would say under them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.guidance import Grammar, Guides
from jaxengine.text import Tokenizer
from tests.text import toy_tokenizers as toy

ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
"""

WIDTH = 330  # wider than the toy tokenizer, and no multiple of 32
KINDS = [toy.byte_level, toy.sentencepiece, toy.metaspace, toy.word_level]


def tokenizer_of(kind=toy.byte_level) -> Tokenizer:
    return Tokenizer(kind())


TOKENIZER = tokenizer_of()
EOS = (TOKENIZER.encode(toy.EOS)[0], TOKENIZER.encode(toy.END)[0])


def fresh(eos: Sequence[int] = EOS, tokenizer: Tokenizer = TOKENIZER, width: int = WIDTH) -> Guides:
    return Guides(tokenizer, eos, width)


class Cursor(NamedTuple):
    """Where a turn stands in its grammar, and what is proposed to come next; both int32."""

    grammar: Grammar
    tokens: np.ndarray
    drafts: np.ndarray


def cursor(grammar: Grammar, tokens: Sequence[int] = (), drafts: Sequence[int] = ()) -> Cursor:
    return Cursor(grammar, np.array(tokens, np.int32), np.array(drafts, np.int32))


def masks(guides: Guides, *cursors: Cursor) -> np.ndarray:
    """bool[rows, vocab_size], the rows of one cursor behind those of the other."""
    words = -(-guides.vocab_size // 32)
    outs = [np.full((1 + len(each.drafts), words), 0xDEADBEEF, np.uint32) for each in cursors]
    for each, rows in zip(cursors, outs, strict=True):
        guides.fill(*each, rows)
    out = np.concatenate(outs)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert not bits[:, guides.vocab_size :].any()
    return bits[:, : guides.vocab_size]


def allowed(guides: Guides, grammar: Grammar, tokens: Sequence[int] = ()) -> set[int]:
    return set(np.flatnonzero(masks(guides, cursor(grammar, tokens))[0]).tolist())


def simulated(
    guides: Guides, grammar: Grammar, seed: int, most: int = 400, eos: Sequence[int] = EOS
) -> list[int] | None:
    """A turn of random allowed tokens without the EOS id that ended it; None if it was cut.

    EOS is taken as soon as it is allowed in half of the turns, so that endless grammars end.
    """
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(guides, grammar, tokens)
        ends = choices & set(eos)
        assert bool(ends) == guides.is_complete(grammar, tokens)
        assert ends in (set(), set(eos))
        if ends and (choices == ends or rng.random() < 0.5):
            return tokens
        texts = sorted(choices - ends)
        # Short tokens come first in a vocabulary. The quote that ends a string is one of them.
        tokens.append(int(rng.choice(texts[:50] if rng.random() < 0.3 else texts)))
    return None


def spelled(text: str) -> list[int]:
    """One token a byte: a spelling that no tokenizer would choose."""
    bytes_of = {TOKENIZER.piece(token, first=False): token for token in range(TOKENIZER.vocab_size)}
    return [bytes_of[bytes([byte])] for byte in text.encode()]
