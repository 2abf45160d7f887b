"""Append-only integer sequences, one a request, that many state values share without copying.

A `Log` is a chain of chunks: appending makes one node in front of everything before it, so every older value stays what
it was. A `LogTable` holds one log a row and keeps the newest few entries of all rows in one NumPy array, so that
appending a token to each of thousands of rows is one vectorised write and a row's chain grows only once in `TAIL`
steps.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import numpy as np

TAIL = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Log:
    """A chunk of int32 values and the chain before it; `length` counts both."""

    before: Log | None
    chunk: np.ndarray
    length: int

    def extend(self, values: np.ndarray) -> Log:
        """Returns a log with `values` behind this one's, which stays as it is."""
        return Log(self, values, self.length + len(values)) if len(values) else self

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns values [start, stop) as int32[stop - start]; costs the chunks from the end back to `start`."""
        pieces: list[np.ndarray] = []
        node: Log | None = self
        while node is not None and node.length > start:
            first = node.length - len(node.chunk)
            pieces.append(node.chunk[max(start - first, 0) : max(stop - first, 0)])
            node = node.before
        return np.concatenate(pieces[::-1]) if pieces else np.zeros(0, np.int32)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Log):
            return NotImplemented
        return self.length == other.length and np.array_equal(
            self.read(0, self.length), other.read(0, other.length)
        )


EMPTY = Log(None, np.zeros(0, np.int32), 0)


@flax.struct.dataclass
class LogTable:
    """One append-only sequence of int32 a row.

    Attributes:
        older: object[rows], the `Log` of all but each row's newest entries.
        lengths: int64[rows], entries of each row, old and new.
        tail: int32[rows, TAIL], the newest entries.
        filled: int32[rows], how many entries of `tail` count.
    """

    older: np.ndarray
    lengths: np.ndarray
    tail: np.ndarray
    filled: np.ndarray

    @staticmethod
    def empty() -> LogTable:
        """Returns a table with no rows."""
        return LogTable(
            np.zeros(0, object), np.zeros(0, np.int64), np.zeros((0, TAIL), np.int32), np.zeros(0, np.int32)
        )

    def add_row(self) -> LogTable:
        """Returns the table with one empty row behind the others."""
        older = np.empty(len(self.older) + 1, object)
        older[:-1], older[-1] = self.older, EMPTY
        return LogTable(
            older,
            np.append(self.lengths, 0),
            np.concatenate([self.tail, np.zeros((1, TAIL), np.int32)]),
            np.append(self.filled, np.int32(0)),
        )

    def remove_row(self, row: int) -> LogTable:
        """Returns the table without `row`; later rows move up."""
        columns = (self.older, self.lengths, self.tail, self.filled)
        return LogTable(*(np.delete(column, row, axis=0) for column in columns))

    def clear_rows(self, rows: np.ndarray) -> LogTable:
        """Returns the table with `rows` empty."""
        older, lengths, filled = self.older.copy(), self.lengths.copy(), self.filled.copy()
        for row in rows:
            older[row] = EMPTY
        lengths[rows] = filled[rows] = 0
        return LogTable(older, lengths, self.tail, filled)

    def read(self, row: int, start: int, stop: int) -> np.ndarray:
        """Returns a copy of entries [start, stop) of `row` as int32[stop - start]."""
        older: Log = self.older[row]
        if start >= older.length:
            return self.tail[row, start - older.length : stop - older.length].copy()
        newest = self.tail[row, : max(stop - older.length, 0)]
        return np.concatenate([older.read(start, min(stop, older.length)), newest])

    def last(self, rows: np.ndarray) -> np.ndarray:
        """Returns the newest entry of each of `rows`, none of them empty, as int32[len(rows)]."""
        found = self.tail[rows, self.filled[rows] - 1]
        for i in np.flatnonzero(self.filled[rows] == 0):
            found[i] = self.older[rows[i]].chunk[-1]
        return found

    def extend(self, row: int, values: np.ndarray) -> LogTable:
        """Returns the table with `values` behind the entries of `row`."""
        older, lengths, filled = self.older.copy(), self.lengths.copy(), self.filled.copy()
        older[row] = (
            older[row].extend(self.tail[row, : filled[row]].copy()).extend(np.asarray(values, np.int32))
        )
        lengths[row] += len(values)
        filled[row] = 0
        return LogTable(older, lengths, self.tail, filled)

    def append_each(self, rows: np.ndarray, values: np.ndarray) -> LogTable:
        """Returns the table with `values[i]` behind the entries of `rows[i]`; the rows are distinct."""
        if len(rows) == 0:
            return self
        older, lengths, tail, filled = self.older, self.lengths.copy(), self.tail.copy(), self.filled.copy()
        full = rows[filled[rows] == TAIL]
        if len(full):
            older = older.copy()
            for row in full:
                older[row] = older[row].extend(self.tail[row].copy())
            filled[full] = 0
        tail[rows, filled[rows]] = values
        filled[rows] += 1
        lengths[rows] += 1
        return LogTable(older, lengths, tail, filled)
