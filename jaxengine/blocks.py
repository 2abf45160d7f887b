"""The block pool: which blocks no table holds, and how many a sequence needs.

A pool is the array of its free ids, a stack whose top is at the end. Taking is a slice and giving back a concatenation,
so every older value of the pool stays what it was.
"""

from __future__ import annotations

import numpy as np


def blocks_for(slots: np.ndarray | int, block_size: int) -> np.ndarray:
    """Returns ceil(slots / block_size), element by element."""
    return -(-np.asarray(slots) // block_size)


def whole_pool(num_blocks: int) -> np.ndarray:
    """Returns int32[num_blocks], the pool with every block free; 0 is handed out first."""
    return np.arange(num_blocks, dtype=np.int32)[::-1]


def release(free: np.ndarray, block_ids: np.ndarray, num_blocks: int) -> np.ndarray:
    """Returns the pool with `block_ids` free again.

    Args:
        free: int32[free], the pool.
        block_ids: int32[n], the blocks given back.
        num_blocks: Size of the whole pool.

    Raises:
        ValueError: An id is out of range, free already, or given twice.
    """
    if len(block_ids) == 0:
        return free
    outside = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
    if len(outside):
        raise ValueError(
            f"block {int(outside[0])} is outside the pool of {num_blocks} blocks; free blocks it handed out"
        )
    held = np.ones(num_blocks, bool)
    held[free] = False
    distinct, counts = np.unique(block_ids, return_counts=True)
    wrong = np.concatenate([block_ids[~held[block_ids]], distinct[counts > 1]])
    if len(wrong):
        raise ValueError(f"block {int(wrong[0])} is free already; free each block once")
    return np.concatenate([free, block_ids[::-1].astype(np.int32)])
