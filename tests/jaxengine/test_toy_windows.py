"""A test of the test: a wrong place, block or slot of a ring changes the tokens of the windowed toy decoder."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxengine as je
from jaxengine import toy
from tests.jaxengine.harness import begun, finish, tokens_of

WINDOW, ROWS, SIZE = 4, 3, 4
MODEL = toy.toy_model(window=WINDOW)
CONFIG = je.EngineConfig(ROWS, max_scheduled_tokens=16, num_blocks=16, block_size=SIZE, chunk_size=3)

READS = {"another place": 0, "another block": 1, "value for key": 2, "another slot": 4}
"""The axis of the rings along which what is read is off by one."""


def _written_to(**change):
    def write(to):
        columns = {name: fault(getattr(to, name)) for name, fault in change.items()}
        return to._replace(**columns)

    return write


WRITES = {
    "another place": _written_to(place=lambda place: np.where(place < ROWS, (place + 1) % ROWS, place)),
    "another block": _written_to(column=lambda column: column + 1),
    "another slot": _written_to(slot=lambda slot: (slot + 1) % SIZE),
    "nowhere": _written_to(place=lambda place: np.full_like(place, ROWS)),
}


class Faulty:
    """The model's programs, with a fault in the rings that they read or in where they write them, no other layer."""

    def __init__(self, axis=None, write=lambda to: to):
        self.axis, self.write = axis, write
        self.unusable = np.zeros(ROWS, bool)

    def forward(self, params, pages, *others, **static):
        full, rings = pages
        if self.axis is not None:
            rings = jnp.roll(rings, 1, self.axis)
        return MODEL.programs.forward(params, (full, rings), *others, **static)

    def choose(self, *given, **static):
        choice = MODEL.programs.choose(*given, **static)
        self.unusable |= ~np.array(choice.usable)[:ROWS]
        return choice._replace(usable=np.ones(len(choice.usable), bool))

    def publish(self, pages, *others, **static):
        *others, to = others
        (_, rings), _, _ = MODEL.programs.publish_copy(pages, *others, self.write(to), **static)
        (full, _), table, fixed = MODEL.programs.publish_copy(pages, *others, to, **static)
        return (full, rings), table, fixed


@pytest.mark.parametrize(
    "make",
    [functools.partial(Faulty, axis=axis) for axis in READS.values()]
    + [functools.partial(Faulty, write=write) for write in WRITES.values()],
    ids=[f"reads {name}" for name in READS] + [f"writes {name}" for name in WRITES],
)
def test_P3_a_wrong_place_block_or_slot_of_a_ring_changes_the_tokens(make):
    """In the three steps after the first token, of three rows; each right by chance once in 28 ** 2 or more."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        prompts = [rng.integers(0, toy.LETTERS, 9).tolist() for _ in range(ROWS)]
        state, faulty = begun(MODEL, *prompts, limit=5, config=CONFIG), make()
        for _ in range(3):
            state, _ = je.step(MODEL, state)
        for _ in range(3):
            state, _ = je.step(dataclasses.replace(MODEL, programs=faulty), state)
        state, _ = finish(MODEL, state)
        found = [tokens_of(state, i + 1) for i in range(ROWS)]
        plain = [[*prompt, *toy.continuation(prompt, 5, window=WINDOW)] for prompt in prompts]
        differs = [one != other for one, other in zip(found, plain, strict=True)]
        assert (differs | faulty.unusable).all()


def test_P3_the_example_of_the_docstring_holds():
    assert toy.number(1, 1, 1 + 3) == 15
    assert toy.next_token([3, 1], window=1) == (22 + 5 * 15) % 28 == 13
