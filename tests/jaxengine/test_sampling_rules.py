"""What a token is drawn from, against the rules in NumPy over generated rows; draws, by chi-square; and that a row's
result is its own to the bit (K1, K2, K3, K4, cases C12, C13 and C15)."""

import dataclasses

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings

from jaxengine import sampling
from tests.jaxengine.drawing import Row, distribution, edited, edits_of, logits_of, ranked, settings_of

VOCAB, KNOWN = 330, 325  # no multiple of 32 nor of a row's columns
ROWS = 4
choose = jax.jit(sampling.choose, static_argnames=("known_ids", "top"))


def logits_like(kind, seed):
    random = np.random.default_rng(seed)
    normal = random.normal(size=VOCAB).astype(np.float32)
    if kind == "ties":
        return random.choice(np.array([-np.inf, -1.0, -0.0, 0.0, 0.5, 2.0], np.float32), VOCAB)
    if kind == "one finite":
        return np.where(np.arange(VOCAB) == random.integers(KNOWN), normal, np.float32(-np.inf))
    if kind == "huge":
        return random.choice(np.array([-3e38, -1e10, -1e-40, 0.0, 1e-40, 1e10, 3e38], np.float32), VOCAB)
    scale = {"equal": 0.0, "flat": 0.01, "usual": 3.0, "peaked": 30.0}[kind]
    return scale * normal


KINDS = ["ties", "one finite", "huge", "equal", "flat", "usual", "peaked"]
LOGITS = st.builds(logits_like, st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
KNOWN_ID = st.integers(0, KNOWN - 1)
# Sums of powers of two and their products are exact, so that ties are the same in every order of computing.
FILTERED = {
    "logits": LOGITS,
    "temperature": st.sampled_from([0.0, 2e-5, 1e-3, 0.7, 1.0, 5.0, 100.0, 3e38]),
    "top_k": st.sampled_from([0, 0, 1, 2, 40, 128, 129, 300, KNOWN, KNOWN + 1, VOCAB + 1, 2**31 - 1]),
    "top_p": st.sampled_from([1.0, 1.0, 0.0, 1e-30, 0.1, 0.5, 0.9, 0.99999]),
    "min_p": st.sampled_from([0.0, 0.0, 1e-3, 0.1, 0.5, 1.0]),
    "seed": st.integers(0, 2**32 - 1),
    "position": st.integers(0, 2**31 - 1),
}
EDITED = {
    "repetition": st.sampled_from([1.0, 1.0, 1.25, 0.5, 3.0]),
    "presence": st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    "frequency": st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    "history": st.lists(KNOWN_ID | st.integers(0, 3), max_size=12).map(tuple),
    "output_from": st.integers(0, 12),
    "bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.5, 100.0]), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    "masked": st.sets(st.integers(0, VOCAB - 1), max_size=40).map(tuple),
}
PLAIN_ROW = st.builds(Row, **FILTERED)
EDITED_ROW = st.builds(Row, **FILTERED, **EDITED)
BATCH = st.lists(PLAIN_ROW | EDITED_ROW, min_size=ROWS, max_size=ROWS)


def probabilities(choice):
    """float64[rows, vocab], from logprobs of all ids."""
    result = np.zeros(choice.logprobs.ids.shape)
    np.put_along_axis(
        result, np.asarray(choice.logprobs.ids), np.exp(np.asarray(choice.logprobs.values, np.float64)), 1
    )
    return result


def usable(row):
    return np.isfinite(edited(row, KNOWN).max())


def side_by_side(rows, *, cuda, default):
    """`jax.lax.platform_dependent` as on a GPU."""
    return cuda(rows)


@pytest.fixture(scope="module", params=["listed", "searched", "side by side"])
def choose_all(request):
    """All rows' distributions; with one id listed in order, the filters have to search."""

    def everything(logits, rows, edits):
        processed = np.ones(ROWS, bool)
        return sampling.choose(logits, rows, edits, known_ids=KNOWN, top=VOCAB, processed=processed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_LISTED", 1 if request.param == "searched" else 128)
        if request.param == "side by side":
            patch.setattr(jax.lax, "platform_dependent", side_by_side)
        compiled = jax.jit(everything)
        row = [Row(np.zeros(VOCAB))] * ROWS
        compiled(logits_of(row), settings_of(row), edits_of(row))
    return compiled


@given(batch=BATCH)
@settings(max_examples=60)
def test_K1_K2_case_C12_what_is_drawn_from_is_what_the_rules_leave(choose_all, batch):
    choice = choose_all(logits_of(batch), settings_of(batch), edits_of(batch))
    found = probabilities(choice)
    for row, own, token, good in zip(
        batch, found, np.asarray(choice.tokens), np.asarray(choice.usable), strict=True
    ):
        assert good == usable(row)
        assert 0 <= token < VOCAB
        if not good:
            continue
        fewest, most = (distribution(row, KNOWN, slack) for slack in (-1e-5, 1e-5))
        # Weights that float32 has no number for are none.
        assert (own[fewest > 1e-30] > 0).all()
        assert (own[most == 0] == 0).all()
        expected = np.where(own > 0, most, 0.0)
        np.testing.assert_allclose(own, expected / expected.sum(), rtol=3e-5, atol=1e-30)
        best = ranked(distribution(dataclasses.replace(row, top_p=1.0, min_p=0.0, top_k=1), KNOWN))[0]
        assert own[best] > 0
        assert own[token] > 0
        if row.temperature == 0 or row.top_k == 1 or row.top_p == 0:
            assert token == best


def bits(choice, rows):
    """Everything of the given rows, as bytes a row."""
    parts = [np.asarray(part)[rows] for part in jax.tree.leaves(choice)]
    return [tuple(part[i].tobytes() for part in parts) for i in range(len(parts[0]))]


@given(
    batch=BATCH,
    order=st.permutations(range(ROWS)),
    processed=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
@settings(max_examples=25)
def test_K3_a_row_has_the_same_bits_alone_in_any_order_and_under_any_padding(batch, order, processed):
    processed = np.array(processed)
    # Numbers whose products are rounded, which one instruction for a product and a sum would show.
    batch = [
        dataclasses.replace(row, presence=row.presence * 0.3, frequency=row.frequency * 0.7) for row in batch
    ]

    def chosen(places, repeats=1, top=5, **padding):
        rows = [batch[i] for i in places] * repeats
        flags = np.tile(processed[list(places)], repeats)
        return choose(
            logits_of(rows),
            settings_of(rows),
            edits_of(rows, **padding),
            known_ids=KNOWN,
            top=top,
            processed=flags,
        )

    together = bits(chosen(range(ROWS)), range(ROWS))
    assert bits(chosen(order), np.argsort(order)) == together
    assert bits(chosen(range(ROWS), entries=29, biases=7), range(ROWS)) == together
    assert bits(chosen(range(ROWS), repeats=9), range(7 * ROWS, 8 * ROWS)) == together
    for i in range(ROWS):
        assert bits(chosen([i]), [0]) == [together[i]]
    tokens = np.asarray(chosen(range(ROWS)).tokens)
    assert np.asarray(chosen(range(ROWS), top=None).tokens).tolist() == tokens.tolist()


@given(batch=st.lists(PLAIN_ROW, min_size=ROWS, max_size=ROWS), processed=st.booleans())
@settings(max_examples=25)
def test_K3_edits_that_are_off_are_no_edits(batch, processed):
    flags = np.full(ROWS, processed)
    arguments = logits_of(batch), settings_of(batch)
    for top in (None, 5):
        without = choose(*arguments, None, known_ids=KNOWN, top=top, processed=flags)
        off = choose(*arguments, edits_of(batch), known_ids=KNOWN, top=top, processed=flags)
        # A history that nothing penalises, beside a row that has edits.
        history = [dataclasses.replace(row, history=(1, 2, 2), output_from=1) for row in batch]
        history[-1] = dataclasses.replace(history[-1], presence=0.5)
        beside = choose(*arguments, edits_of(history), known_ids=KNOWN, top=top, processed=flags)
        assert bits(off, range(ROWS)) == bits(without, range(ROWS))
        assert bits(beside, range(ROWS - 1)) == bits(without, range(ROWS - 1))


SMALL = np.array([1.0, 4.0, 2.0, 3.0, 0.5, -1.0, 0.0, 6.0], np.float32)
TIED = np.array([2.0, 2.0, 2.0, 1.0, 1.0, 1.0, -np.inf, 6.0], np.float32)
SMALL_KNOWN = 7
EDITS = {
    "repetition": 1.5,
    "presence": 0.25,
    "frequency": 0.5,
    "history": (1, 5, 1, 1, 2),
    "output_from": 2,
    "bias": ((4, 2.0), (6, -1.0)),
    "masked": (3,),
}
MIXED = [
    Row(SMALL),
    Row(SMALL, temperature=0.0),
    Row(SMALL, temperature=0.5),
    Row(SMALL, temperature=100.0),
    Row(SMALL, temperature=1e-6),
    Row(SMALL, top_k=3),
    Row(SMALL, top_p=0.8),
    Row(SMALL, min_p=0.1),
    Row(TIED, top_k=2),
    Row(TIED, top_p=0.5),
    Row(TIED, top_k=4, top_p=0.95, min_p=0.2),
    Row(SMALL, temperature=2.0, top_k=5, top_p=0.9, min_p=0.15),
    Row(SMALL, **EDITS),
    Row(SMALL, temperature=1.5, top_k=4, **EDITS),
    Row(SMALL, temperature=1.5, top_p=0.7, **EDITS),
    Row(TIED, temperature=0.7, min_p=0.05, **EDITS),
]
CALLS, REPEATS = 16, 256


def assert_distributed(counts, expected):
    """Chi-square at one in a hundred thousand; the draws are the same every time."""
    assert counts[expected == 0].sum() == 0
    cells = expected * counts.sum() >= 5
    observed = np.append(counts[cells], counts[~cells].sum())
    wanted = np.append(expected[cells], expected[~cells].sum()) * counts.sum()
    possible = wanted > 0
    if possible.sum() > 1:
        assert scipy.stats.chisquare(observed[possible], wanted[possible]).pvalue > 1e-5


def draws_of(rows, calls, repeats, known_ids):
    """int64[rows, vocab], how often each id was drawn at so many positions of each row's stream."""
    counts = np.zeros((len(rows), len(rows[0].logits)), np.int64)
    many = rows * repeats
    logits, own_settings, edits = logits_of(many), settings_of(many), edits_of(many)
    for call in range(calls):
        position = np.repeat(np.arange(repeats, dtype=np.int32) + call * repeats, len(rows))
        choice = choose(logits, own_settings._replace(position=position), edits, known_ids=known_ids)
        tokens = np.asarray(choice.tokens).reshape(repeats, len(rows))
        for i in range(len(rows)):
            counts[i] += np.bincount(tokens[:, i], minlength=counts.shape[1])
    return counts


def test_K1_case_C12_case_C13_one_mixed_batch_draws_every_row_from_its_own_distribution():
    rows = [dataclasses.replace(row, seed=100 + i) for i, row in enumerate(MIXED)]
    counts = draws_of(rows, CALLS, REPEATS, SMALL_KNOWN)
    for row, own in zip(rows, counts, strict=True):
        expected = distribution(row, SMALL_KNOWN)
        if row.temperature == 0:
            expected = np.eye(len(own))[expected.argmax()]
        assert_distributed(own, expected)


def test_case_C15_temperatures_0_05_and_2_with_penalty_mask_and_top_p_in_one_batch():
    """What a draft is checked against is the distribution after everything: here its marginal, by 50,000 draws."""
    logits = np.array([2.0, 1.0, 0.5, -0.5], np.float32)
    edits = {"repetition": 2.0, "history": (0, 1, 0), "output_from": 1, "presence": 0.75, "masked": (3,)}
    rows = [Row(logits, temperature=t, top_p=0.9, seed=7 + i, **edits) for i, t in enumerate((0.0, 0.5, 2.0))]
    counts = draws_of(rows, 25, 2000, 4)
    assert counts[0].tolist() == [0, 0, 50_000, 0]
    for row, own in zip(rows[1:], counts[1:], strict=True):
        expected = distribution(row, 4)
        assert 0 < np.count_nonzero(expected) <= 3
        assert_distributed(own, expected)


def test_K1_a_wide_vocabulary_is_drawn_from_in_all_its_columns_and_blocks():
    logits = np.where(np.arange(VOCAB) % 3 == 0, 0.0, 1.0).astype(np.float32)
    row = Row(logits, seed=3)
    assert_distributed(draws_of([row], 40, 1000, KNOWN)[0], distribution(row, KNOWN))


def test_the_chi_square_can_fail():
    row = Row(SMALL, seed=1)
    counts = draws_of([row], 1, 4000, SMALL_KNOWN)[0]
    assert_distributed(counts, distribution(row, SMALL_KNOWN))
    with pytest.raises(AssertionError):
        assert_distributed(counts, distribution(dataclasses.replace(row, temperature=1.2), SMALL_KNOWN))


@pytest.mark.parametrize("p", [0.0, 1e-45, 0.5, 0.7, 0.73, 0.74, 0.99999])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 5, 10**9])
def test_case_C12_top_p_works_on_what_top_k_left_renormalised(k, p):
    """Logits 4, 3, 2, 1: of the two best, the first has 0.731."""
    rows = [Row(np.array([4.0, 3.0, 2.0, 1.0]), top_k=k, top_p=p)] * 2
    choice = choose(logits_of(rows), settings_of(rows), known_ids=4, top=4, processed=np.ones(2, bool))
    assert (probabilities(choice)[0] > 0).tolist() == (distribution(rows[0], 4) > 0).tolist()
