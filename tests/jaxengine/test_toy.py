"""A test of the test: each kind of wrong key, value, position, slot and table entry changes the toy decoder's tokens.

Faults go into what the compiled programs are given, in a real engine of eight requests. One that the toy decoder did
not notice would be one that no test over it can find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxengine as je
from jaxengine import toy
from jaxengine.programs import Destinations, StepBatch
from tests.jaxengine.harness import begun, finish, tokens_of

MODEL = toy.toy_model()
ROWS, SIZE, BLOCKS = 8, 4, 48
CONFIG = je.EngineConfig(ROWS, max_scheduled_tokens=256, num_blocks=BLOCKS, block_size=SIZE)
WINDOW = toy.CHANNELS
"""Tokens within which a fault must show: one of each channel."""

# At most 15 tokens, so that a prompt's queries fit one attention tile of 16 with a place to spare.
PROMPT = st.lists(st.integers(0, toy.LETTERS - 1), min_size=5, max_size=15)
PROMPTS = st.lists(PROMPT, min_size=ROWS, max_size=ROWS)
EACH = np.arange(ROWS)


@dataclasses.dataclass
class Inputs:
    """What a forward program is given, for faults to alter; row i is the i-th request.

    Pages are [blocks, keys or values, slots, head_dim].
    """

    pages: np.ndarray
    table: np.ndarray
    batch: StepBatch
    rng: np.random.Generator

    @property
    def past(self) -> np.ndarray:
        return self.batch.tiles.past[:ROWS]

    def columns(self) -> np.ndarray:
        """Of each row, a column in which it and the next row have committed tokens."""
        return self.rng.integers(0, -(-np.minimum(self.past, np.roll(self.past, -1)) // SIZE))

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, block and slot of a committed token."""
        position = self.rng.integers(0, self.past)
        return self.table[EACH, position // SIZE], position % SIZE

    def prompt_tokens(self) -> np.ndarray:
        """Of each row, the packed index of one of its tokens."""
        return self.rng.integers(self.batch.tiles.row_start[:ROWS], self.batch.logits_rows + 1)

    def alter(self, **batch: np.ndarray) -> None:
        self.batch = self.batch._replace(**batch)

    def alter_tiles(self, **tiles: np.ndarray) -> None:
        self.alter(tiles=self.batch.tiles._replace(**tiles))

    def content(self) -> list[tuple]:
        """All that each row reads, in no order: attention sums over its keys."""
        tiles, found = self.batch.tiles, []
        for row, past in enumerate(self.past):
            position = np.arange(past)
            kv = self.pages[self.table[row, position // SIZE], :, position % SIZE]
            own = slice(tiles.row_start[row], self.batch.logits_rows[row] + 1)
            packed = (self.batch.tokens[own], self.batch.positions[own], tiles.lane[own])
            found.append(
                (
                    sorted(kv.reshape(past, self.pages[0, :, 0].size).tolist()),
                    [part.tolist() for part in packed],
                )
            )
        return found


def block_of_another_request(at: Inputs) -> None:
    column = at.columns()
    at.table[EACH, column] = np.roll(at.table, -1, axis=0)[EACH, column]


def block_off_by_one(at: Inputs) -> None:
    column = at.columns()
    at.table[EACH, column] = (at.table[EACH, column] + 1) % BLOCKS


def first_and_last_block_swapped(at: Inputs) -> None:
    """The last is partly filled, or not there yet. Two full ones hold the same keys in any order: no fault."""
    last = at.past // SIZE
    at.table[EACH, 0], at.table[EACH, last] = at.table[EACH, last], at.table[EACH, 0]


def values_of_another_request(at: Inputs, kind: int = 1) -> None:
    column = at.columns()
    mine = at.table[EACH, column]
    at.pages[mine, kind] = at.pages[np.roll(at.table, -1, axis=0)[EACH, column], kind]


def keys_of_another_request(at: Inputs) -> None:
    values_of_another_request(at, kind=0)


def value_of_another_request(at: Inputs, kind: int = 1) -> None:
    (block, slot), (other_block, other_slot) = at.slots(), at.slots()
    at.pages[block, kind, slot] = np.roll(at.pages[other_block, kind, other_slot], -1, axis=0)


def key_of_another_request(at: Inputs) -> None:
    value_of_another_request(at, kind=0)


def key_masked(at: Inputs) -> None:
    block, slot = at.slots()
    at.pages[block, 0, slot, 0] = -1e9


def first_key_masked(at: Inputs) -> None:
    at.pages[at.table[EACH, 0], 0, 0, 0] = -1e9


def last_committed_key_left_out(at: Inputs) -> None:
    at.alter_tiles(past=at.batch.tiles.past - 1)


def slot_past_the_end_seen(at: Inputs) -> None:
    """Never written, left over from an earlier owner, or another's."""
    at.alter_tiles(past=at.batch.tiles.past + 1)


def positions_late(at: Inputs) -> None:
    at.alter(positions=at.batch.positions + 1)


def next_packed_token_seen(at: Inputs) -> None:
    """The mask one too far: the last query takes in the token behind it, which is the next request's."""
    lane = at.batch.tiles.lane.copy()
    lane[at.batch.logits_rows] += 1
    at.alter_tiles(lane=lane, num_queries=at.batch.tiles.num_queries + 1)


def own_key_left_out(at: Inputs) -> None:
    lane = at.batch.tiles.lane.copy()
    lane[at.batch.logits_rows] -= 1
    at.alter_tiles(lane=lane)


def token_at_the_next_position(at: Inputs) -> None:
    positions = at.batch.positions.copy()
    positions[at.prompt_tokens()] += 1
    at.alter(positions=positions)


def all_but_the_first_a_position_late(at: Inputs) -> None:
    at.alter(positions=at.batch.positions + (at.batch.positions > 0))


def all_but_the_first_a_block_late(at: Inputs) -> None:
    at.alter(positions=at.batch.positions + SIZE * (at.batch.positions > 0))


def two_tokens_exchanged(at: Inputs) -> None:
    tokens, one, other = at.batch.tokens.copy(), at.prompt_tokens(), at.prompt_tokens()
    tokens[one], tokens[other] = tokens[other], tokens[one]
    at.alter(tokens=tokens)


def written_a_slot_late(to: Destinations, token: np.ndarray) -> Destinations:
    slot = to.slot.copy()
    slot[token] = (slot[token] + 1) % SIZE
    return to._replace(slot=slot)


def not_written(to: Destinations, token: np.ndarray) -> Destinations:
    """The slot keeps what an earlier owner left there, or nothing."""
    block = to.block.copy()
    block[token] = BLOCKS
    return to._replace(block=block)


def written_to_the_next_block(to: Destinations, token: np.ndarray) -> Destinations:
    """The block itself or its table entry may be another's."""
    block = to.block.copy()
    block[token] = (block[token] + 1) % BLOCKS
    return to._replace(block=block)


IN_DECODE = [
    block_of_another_request,
    block_off_by_one,
    first_and_last_block_swapped,
    values_of_another_request,
    keys_of_another_request,
    value_of_another_request,
    key_of_another_request,
    key_masked,
    first_key_masked,
    last_committed_key_left_out,
    slot_past_the_end_seen,
    positions_late,
]
IN_PREFILL = [
    token_at_the_next_position,
    all_but_the_first_a_position_late,
    all_but_the_first_a_block_late,
    two_tokens_exchanged,
]
IN_MASK_OF_PREFILL = [next_packed_token_seen, own_key_left_out]
IN_PUBLISH = [written_a_slot_late, not_written, written_to_the_next_block]
AT_ONCE = [key_masked, first_key_masked, last_committed_key_left_out, own_key_left_out]


class Faulty:
    """The model's programs, with a fault in what they are given.

    `hit` are rows whose content every faulty step changed, `unusable` those that got no token.
    """

    def __init__(self, fault: Callable | None, seed: int) -> None:
        self.fault, self.rng = fault, np.random.default_rng(seed)
        self.hit, self.unusable = np.ones(ROWS, bool), np.zeros(ROWS, bool)

    def forward(self, params, pages, table, fixed, batch, **static):
        at = Inputs(np.array(pages[0][:, :, 0]), np.array(table), batch, self.rng)
        self.tokens = at.prompt_tokens()
        if self.fault and self.fault not in IN_PUBLISH:
            before = at.content()
            self.fault(at)
            self.hit &= [one != other for one, other in zip(before, at.content(), strict=True)]
        return MODEL.programs.forward(
            params, (jnp.array(at.pages[:, :, None]),), jnp.array(at.table), fixed, at.batch, **static
        )

    def choose(self, *given, **static):
        choice = MODEL.programs.choose(*given, **static)
        self.unusable |= ~np.array(choice.usable)[:ROWS]
        return choice._replace(usable=np.ones(len(choice.usable), bool))

    def publish(self, pages, table, fixed, staged, states, to, **static):
        if self.fault in IN_PUBLISH:
            to = self.fault(to, self.tokens)
        return MODEL.programs.publish(pages, table, fixed, staged, states, to, **static)


def start(prompts: list[list[int]], reused: bool) -> je.EngineState:
    """Eight requests with a prompt each; `reused`: in a pool that earlier owners have filled."""
    if not reused:
        return begun(MODEL, *prompts, config=CONFIG)
    # No letter of the prompts, so that no stale key is by chance the right one.
    state = begun(MODEL, *[[30] * (BLOCKS * SIZE // ROWS)] * ROWS, config=CONFIG)
    state, _ = je.step(MODEL, state)
    for request_id in state.control.requests.id.tolist():
        state = je.close_request(state, request_id)
    for prompt in prompts:
        state, request_id = je.create_request(state)
        state, _ = je.begin_turn(state, request_id, prompt)
    return state


def differs(
    prompts: list[list[int]], reused: bool, seed: int, faults: list[Callable | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a step under each of `faults`.

    Returns:
        bool[ROWS, steps], where there is no token or another than in plain Python, and bool[ROWS], the rows hit.
    """
    state, hit, unusable = start(prompts, reused), np.ones(ROWS, bool), np.zeros((ROWS, 0), bool)
    for nth, fault in enumerate(faults):
        programs = Faulty(fault, seed + nth)
        state, _ = je.step(dataclasses.replace(MODEL, programs=programs), state)
        hit &= programs.hit
        unusable = np.column_stack([unusable, programs.unusable])
    ids = state.control.requests.id.tolist()
    got = [tokens_of(state, i)[len(prompt) :] for i, prompt in zip(ids, prompts, strict=True)]
    plain = [toy.continuation(prompt, len(faults)) for prompt in prompts]
    return (np.array(got) != plain) | unusable, hit


def window(
    fault: Callable, prompts: list[list[int]], reused: bool, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """`differs` for the first `WINDOW` tokens that the fault can change."""
    if fault in IN_PREFILL:
        return differs(prompts, reused, seed, [fault, *[None] * (WINDOW - 1)])
    if fault in IN_MASK_OF_PREFILL:
        cuts = [[prompt[: len(prompt) - n] for prompt in prompts] for n in range(WINDOW)]
        runs = [differs(cut, reused, seed, [fault]) for cut in cuts]
        return np.column_stack([changed for changed, _ in runs]), np.all([hit for _, hit in runs], axis=0)
    after = [fault] * WINDOW if fault in IN_DECODE else [None] * WINDOW
    changed, hit = differs(prompts, reused, seed, [fault if fault in IN_PUBLISH else None, *after])
    assert not changed[:, 0].any()
    return changed[:, 1:], hit


# Drawn without Hypothesis, whose examples depend on the modules that are loaded: a sum modulo 28 can miss by chance,
# once in 28 ** WINDOW or 20,000 times.
@pytest.mark.parametrize(
    "fault", [*IN_DECODE, *IN_PREFILL, *IN_MASK_OF_PREFILL, *IN_PUBLISH], ids=lambda fault: fault.__name__
)
def test_P3_every_kind_of_fault_changes_the_tokens(fault):
    """Over 208 prompts none leaves three tokens in a row as they were; one missing key changes the very next token."""
    rows, rng = [], np.random.default_rng(0)
    for nth in range(26):
        prompts = [rng.integers(0, toy.LETTERS, length).tolist() for length in rng.integers(5, 16, ROWS)]
        changed, hit = window(fault, prompts, reused=nth % 2 == 0, seed=nth)
        assert changed[hit].any(axis=1).all()
        if fault in AT_ONCE:
            assert changed[hit, 0].all()
        rows.extend(changed[hit, 0])
    assert len(rows) >= 100, "the fault hardly ever changed what a row reads"
    assert np.mean(rows) > 0.85


@settings(max_examples=10)
@given(prompts=PROMPTS, reused=st.booleans())
def test_P3_without_a_fault_nothing_changes(prompts, reused):
    changed, _ = differs(prompts, reused, 0, [None] * 4)
    assert not changed.any()


def test_P3_one_key_more_or_fewer_or_half_wrong_always_changes_the_sum():
    """Products of weight and number modulo 28: none is 0, and two that share a factor differ."""
    products = np.outer(toy.WEIGHTS, toy.NUMBERS) % toy.LETTERS
    assert products.all()
    assert all(len(set(line)) == len(line) for line in [*products.tolist(), *products.T.tolist()])


def test_P3_one_token_for_another_is_missed_by_all_channels_in_less_than_one_of_1500_pairs():
    """Of all pairs of a token and a position; of a token and its neighbouring positions, never."""
    places = [(t, p) for t in range(toy.LETTERS) for p in range(toy.CONTEXT)]
    seen = np.array(
        [
            [toy.weight(t, p) * toy.number(t, p, c) % toy.LETTERS for c in range(toy.CHANNELS)]
            for t, p in places
        ]
    )
    _, counts = np.unique(seen, axis=0, return_counts=True)
    assert (counts * (counts - 1)).sum() * 1500 < len(places) * (len(places) - 1)
    by_position = seen.reshape(toy.LETTERS, toy.CONTEXT, toy.CHANNELS)
    assert (by_position[:, 1:] != by_position[:, :-1]).any(axis=2).all()


def test_P3_sums_are_exact_up_to_the_whole_context():
    """The largest sum there is: at each position the token of the largest product."""
    worst = [
        max(
            range(toy.LETTERS),
            key=lambda t, p=p: toy.weight(t, p) * max(toy.number(t, p, c) for c in range(3)),
        )
        for p in range(toy.CONTEXT - 3)
    ]
    state, _ = finish(MODEL, begun(MODEL, worst))
    assert tokens_of(state, 1) == [*worst, *toy.continuation(worst, 3)]


def test_P3_the_example_of_the_docstring_holds():
    assert (toy.weight(3, 0), toy.number(3, 0, 1), toy.weight(1, 1), toy.number(1, 1, 1)) == (1, 10, 5, 8)
    assert toy.next_token([3, 1]) == (10 + 40) % 28 == 22
