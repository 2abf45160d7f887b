"""What a tuning run may try and what it writes, without a card to time it on."""

import dataclasses

import pytest

from benchmarks import attention_tuning
from benchmarks.attention_tuning import as_json, best_of, candidates
from pallas_kernels.tuning import parse, table

ENTRIES = table().attention


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_every_candidate_is_a_valid_entry_for_the_same_calls(entry):
    found = candidates(entry)
    assert found[0] == entry
    assert len(set(found)) == len(found) >= 8
    assert {(cut.head_dim, cut.rows) for cut in found} == {(entry.head_dim, entry.rows)}
    whole = dataclasses.replace(table(), attention=tuple(found))
    assert parse(as_json(whole)) == whole


def test_the_fastest_cut_of_each_entry_is_written_and_an_entry_without_any_stays():
    fastest = {entry: candidates(entry)[-1] for entry in ENTRIES[1:]}

    def times(entry):
        return {cut: 1 + (cut != fastest[entry]) for cut in candidates(entry)} if entry in fastest else {}

    found = parse(as_json(best_of(table(), times)))
    assert found.attention == (ENTRIES[0], *fastest.values())


def test_tuning_without_a_hopper_card_is_refused(tmp_path, capsys):
    file = tmp_path / "table.json"
    assert attention_tuning.main(["--out", str(file)]) == 1
    assert "on a Hopper GPU only" in capsys.readouterr().err
    assert not file.exists()
