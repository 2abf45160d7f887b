"""`LogTable` against a list of lists, with every older value looked at again at the end: what tokens and block tables
(A3, D2) and dropped steps (E2) rest on."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from jaxengine.logs import EMPTY, TAIL, Log, LogTable

VALUES = st.lists(st.integers(0, 2**31 - 1), max_size=2 * TAIL + 2)
MANY = st.integers(0, 2 * TAIL + 2).map(lambda count: list(range(count)))
COMMANDS = st.lists(
    st.one_of(
        st.just(("add", 0, [])),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just([])),
        st.tuples(st.just("extend"), st.integers(0, 9), VALUES),
        st.tuples(
            st.just("append"),
            st.integers(0, 2**10 - 1),
            st.lists(st.integers(0, 99), min_size=10, max_size=10),
        ),
        st.tuples(st.just("append many times"), st.integers(0, 9), MANY),
    ),
    max_size=25,
)


def apply(table, lists, command):
    name, number, values = command
    lists = [list(entries) for entries in lists]
    if name == "add":
        return table.add_row(), [*lists, []]
    if not lists:
        return table, lists
    row = number % len(lists)
    if name == "remove":
        del lists[row]
        return table.remove_row(row), lists
    if name == "append":
        rows = [i for i in range(len(lists)) if number >> i & 1]
        for i in rows:
            lists[i].append(values[i % 10])
        return table.append_each(
            np.array(rows, np.int64), np.array([values[i % 10] for i in rows], np.int32)
        ), lists
    lists[row] += values
    if name == "extend":
        return table.extend(row, np.array(values, np.int64)), lists
    for value in values:
        table = table.append_each(np.array([row]), np.array([value]))
    return table, lists


def contents(table):
    return [table.read(row, 0, int(length)).tolist() for row, length in enumerate(table.lengths)]


@given(commands=COMMANDS)
@settings(max_examples=150)
def test_D2_E2_a_log_table_is_a_list_of_lists_and_older_values_never_change(commands):
    table, lists = LogTable.empty(), []
    history = [(table, lists)]
    for command in [("add", 0, []), ("add", 0, []), *commands]:
        table, lists = apply(table, lists, command)
        history.append((table, lists))
    for table, lists in history:
        assert contents(table) == lists
        assert table.lengths.tolist() == [len(entries) for entries in lists]
        rows = np.array([row for row, entries in enumerate(lists) if entries], np.int64)
        assert table.last(rows).tolist() == [lists[row][-1] for row in rows]


@given(
    values=st.lists(VALUES, max_size=4), appended=st.lists(st.integers(0, 9), max_size=TAIL), data=st.data()
)
@settings(max_examples=80)
def test_A3_any_slice_of_a_log_is_the_slice_of_the_list_and_a_copy(values, appended, data):
    table, entries = LogTable.empty().add_row(), []
    for chunk in values:
        table, entries = table.extend(0, np.array(chunk, np.int32)), entries + chunk
    for value in appended:
        table, entries = table.append_each(np.array([0]), np.array([value])), [*entries, value]
    start = data.draw(st.integers(0, len(entries)))
    stop = data.draw(st.integers(start, len(entries)))
    read = table.read(0, start, stop)
    assert read.dtype == np.int32
    assert read.tolist() == entries[start:stop]
    read[:] = -7
    assert table.read(0, 0, len(entries)).tolist() == entries


@given(cuts=st.lists(VALUES, max_size=4), other=st.lists(VALUES, max_size=4))
def test_E2_logs_are_equal_when_their_entries_are_however_they_are_cut(cuts, other):
    def log(chunks):
        made = EMPTY
        for chunk in chunks:
            made = made.extend(np.array(chunk, np.int32))
        return made

    entries, others = (list(itertools.chain(*chunks)) for chunks in (cuts, other))
    assert log(cuts) == log([entries])
    assert (log(other) == log(cuts)) == (others == entries)
    assert log(cuts) != entries


def test_a_long_log_is_read_and_thrown_away_without_recursion():
    log = EMPTY
    for value in range(50_000):
        log = Log(log, np.array([value], np.int32), value + 1)
    assert log.read(49_990, 50_000).tolist() == list(range(49_990, 50_000))
    assert log == log.extend(np.zeros(0, np.int32))
    del log
