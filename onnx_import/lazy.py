"""Arrays that are made when they are read, so that loading a model holds one piece of it twice at most."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_PIECE = 1 << 18
"""Elements that are made at a time where the shape allows it: a few megabytes with all that it takes to make them."""


class LazyArray:
    """An array known by shape and dtype, whose rows are made on demand and not kept.

    `rows(start, stop)` makes the slice [start:stop] along the first axis. NumPy and JAX read it like any array; only
    slices along the first axis can be taken of it.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, rows: Callable[[int, int], np.ndarray]
    ) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._rows = rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        return self._rows(start, stop)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """All rows in order, some at a time: the slice and its values."""
        step = max(1, _PIECE * self.shape[0] // max(math.prod(self.shape), 1))
        for start in range(0, self.shape[0], step):
            yield slice(start, start + step), self[start : start + step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._rows(0, self.shape[0]).astype(dtype or self.dtype, copy=False)
