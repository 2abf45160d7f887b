"""Loading weights: each array made piece by piece in its final place, and the file's pages given back on the way."""

import math
from typing import Any

import jax
import numpy as np

from onnx_import.lazy import LazyArray
from onnx_import.plan import Plan
from onnx_import.registry import WeightPlan
from onnx_import.weights import WeightFiles

_RELEASE_AFTER = 1 << 22
"""Bytes made between two releases of the file's pages: touching a page anew costs time, and keeping it memory."""
_ALIGNMENT = 64
"""Bytes; what XLA aligns its buffers to on a CPU."""


def load_params(plan: Plan, files: WeightFiles) -> dict[str, Any]:
    """Build the parameters one array at a time, so that one at most exists twice in host memory."""
    params = {key: _load(weight, files) for key, weight in plan.weights.items()}
    files.release(plan.tensors)  # once more: reading a tensor also maps pages of its neighbours
    return params


def _load(weight: WeightPlan, files: WeightFiles) -> Any:
    def load(array: np.ndarray | LazyArray) -> jax.Array:
        copy = _aligned(array.shape, array.dtype)
        if isinstance(array, LazyArray):
            made = 0
            for rows, piece in array.pieces():
                copy[rows] = piece
                made += piece.nbytes
                if made > _RELEASE_AFTER:
                    files.release(weight.sources)
                    made = 0
        else:
            copy[...] = array
        files.release(weight.sources)
        return jax.device_put(copy).block_until_ready()

    return jax.tree.map(load, weight.build(*(files.read(tensor) for tensor in weight.sources)))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Room for a copy, which is made always: what aliased the mapped file would change, or fault, when the file does.

    It is aligned as XLA wants it, so that on a CPU the device's array is the copy itself; JAX's own copying may go
    through a second one and keep that for a while.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + nbytes].view(dtype).reshape(shape)
