"""The tables of how kernels cut their work."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pallas_kernels.tuning import attention_tuning, parse, table

GOOD = {
    "multiprocessors": 8,
    "attention": [{"head_dim": 64, "rows": 64, "key_tile": 64, "staged_tile": 16, "stages": 2}],
}


def with_entry(**changes: object) -> str:
    return json.dumps(GOOD | {"attention": [GOOD["attention"][0] | changes]})


BAD = {
    "no JSON": ("{", "can't be read"),
    "no table": ("[]", "can't be read"),
    "no entries": (json.dumps({"multiprocessors": 8}), "can't be read"),
    "an unknown field": (json.dumps(GOOD | {"warps": 4}), "can't be read: .*warps"),
    "an unknown field of an entry": (with_entry(warps=4), "can't be read: .*warps"),
    "a text": (with_entry(stages="4"), "can't be read|whole numbers"),
    "a fraction": (with_entry(rows=64.0), "whole numbers"),
    "nothing": (json.dumps(GOOD | {"multiprocessors": 0}), "whole numbers from 1 on"),
    "an odd tile": (with_entry(key_tile=96), "key_tile in steps of 64"),
    "an odd staged tile": (with_entry(staged_tile=24), "staged_tile in steps of 16"),
    "a large staged tile": (with_entry(staged_tile=128), "no larger"),
    "one buffer": (with_entry(stages=1), "at least 2 stages"),
}


@pytest.mark.parametrize("what", BAD)
def test_R2_a_bad_table_is_refused_in_one_sentence(what):
    text, reason = BAD[what]
    with pytest.raises(ValueError, match=reason):
        parse(text)


def test_R2_a_good_table_is_taken():
    assert parse(json.dumps(GOOD)).attention[0].key_tile == 64


@given(
    head_dim=st.integers(1, 16).map(lambda n: 16 * n),
    items=st.integers(1, 10_000),
    more=st.integers(0, 10_000),
    most_keys=st.integers(1, 2**20),
    invariant=st.booleans(),
)
def test_R2_splits_cover_every_key_and_depend_on_bounds_alone(head_dim, items, more, most_keys, invariant):
    tuning = attention_tuning(head_dim, 64, items, most_keys, batch_invariant=invariant)
    most_tiles = -(-most_keys // tuning.key_tile)
    assert 1 <= tuning.splits <= max(most_tiles, 1)
    if invariant:
        assert tuning.split_tiles * tuning.splits >= most_tiles
        assert tuning == attention_tuning(head_dim, 64, items + more, most_keys, batch_invariant=True)
    else:
        assert tuning.split_tiles is None
        assert (tuning.splits - 1) * items < 2 * table().multiprocessors
