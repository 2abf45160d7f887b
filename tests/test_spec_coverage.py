"""Every behaviour that docs/spec-coverage.md claims is named by the tests that it points to."""

import pytest

from tests.spec_coverage import PAGE, claims, files_by_id, named_in_text, rewrite


def test_every_claim_points_to_tests_that_name_it():
    tests = files_by_id()
    rows = claims(PAGE.read_text())
    assert rows
    empty = [number for number, files in rows.items() if not files]
    wrong = {n: lost for n, files in rows.items() if (lost := sorted(set(files) - set(tests.get(n, []))))}
    assert (empty, wrong) == ([], {}), "name the id in a test, then run `python -m tests.spec_coverage`"


def test_no_behaviour_is_missing_between_the_first_and_the_last_of_a_finished_section():
    """A row that vanishes from the page would take its claim with it."""
    finished = {
        "A": 15,
        "B": 11,
        "C": 11,
        "D": 6,
        "E": 8,
        "F": 9,
        "G": 3,
        "H": 3,
        "I": 6,
        "J": 5,
        "O": 2,
        "P": 3,
    }
    later = {"A14", "E7"}
    wanted = {f"{letter}{n}" for letter, last in finished.items() for n in range(1, last + 1)} - later
    assert wanted - claims(PAGE.read_text()).keys() == set()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("test_E6_chunks_change_nothing", {"E6"}),
        ("test_A1_and_A10_hold", {"A1", "A10"}),
        ("Rows C7 and D4; see case C7.", {"C7", "D4", "case C7"}),
        ("test_case_C12_top_k", {"case C12"}),
        ("Cases C18, C19 and C21 from the field.", {"case C18", "case C19", "case C21"}),
        ("test_case_insensitive_E2", {"E2"}),
        ("Case C11, S2: sizes.", {"case C11", "S2"}),
        ("Q4_K, SmolLM2, BF16, Z9, e6", set()),
    ],
)
def test_ids_are_told_from_other_words(text, ids):
    assert named_in_text(text) - {"Q4"} == ids


def test_a_row_keeps_its_words_and_gets_its_tests():
    page = "| E6 | words | `old.py` |\n| case C7 | more | |\n| not | a row | |\n"
    new = rewrite(page, {"E6": ["a.py", "b.py"]})
    assert new == "| E6 | words | `a.py`, `b.py` |\n| case C7 | more |  |\n| not | a row | |\n"
    assert claims(new) == {"E6": ["a.py", "b.py"], "case C7": []}
