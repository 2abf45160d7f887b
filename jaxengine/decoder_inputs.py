"""A step as the inputs of a packed ONNX graph: rows one behind the other, and bounds on their lengths for the host.

A graph that runs any shape gets exact bounds. One that is captured once for a width of the block table and replayed
gets bounds that hold for every decode step of that width, since the values seen at capture are never read again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxengine.blocks import blocks_for
from jaxengine.checks import require_count
from jaxengine.planning import StepPlan
from jaxengine.state import Control, EngineState
from jaxengine.transaction import require_executable

HOLE = -1
"""Fills the block table behind a row's last block; no position of the row lies there, so it is never read."""

SMALLEST_TABLE_BUCKET = 8
MROPE_AXES = 3
INT32_MAX = int(np.iinfo(np.int32).max)


class DecoderInputs(NamedTuple):
    """The inputs of a packed graph by their names in it; `attention_metadata` stays on the host.

    Attributes:
        input_ids: int64[tokens].
        position_ids: int64[tokens], absolute, or int64[3, tokens] for MRoPE.
        cumulative_sequence_lengths: int32[rows + 1], where each row starts among the tokens, and where the last ends.
        past_sequence_lengths: int32[rows], committed tokens of each row.
        block_table: int32[rows, columns], committed and then reserved blocks, then holes.
        attention_metadata: int32[3], upper bounds on the longest query and on the longest KV length, and a lower
            bound on the longest KV length, in tokens; a row's KV length is its past and its tokens of this step.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    cumulative_sequence_lengths: np.ndarray
    past_sequence_lengths: np.ndarray
    block_table: np.ndarray
    attention_metadata: np.ndarray


def decoder_inputs(state: EngineState, plan: StepPlan, *, mrope: bool = False) -> DecoderInputs:
    """Returns a plan's inputs in their exact shape, rows in the plan's order.

    Args:
        state: The state that the plan was made from; it is only read.
        plan: An executable plan with rows.
        mrope: Repeat the text positions on the three axes of an MRoPE model.

    Returns:
        The inputs; the block table is as wide as the longest row's table.

    Raises:
        SpentStateError: A commit has taken the state over.
        ValueError: The plan is not executable, has no rows, or was made for another state.
    """
    plan = require_executable(state, plan)
    if len(plan.index) == 0:
        raise ValueError("the plan only ends requests and has no rows to feed; execute and commit it")
    control = state.control
    ends = np.cumsum(plan.num_tokens)
    first_position = plan.past - (ends - plan.num_tokens)
    positions = np.arange(plan.total_tokens) + np.repeat(first_position, plan.num_tokens)
    rows = zip(plan.index.tolist(), plan.past.tolist(), plan.num_tokens.tolist(), strict=True)
    tokens = [control.tokens.read(row, past, past + count) for row, past, count in rows]
    return DecoderInputs(
        input_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.tile(positions, (MROPE_AXES, 1)) if mrope else positions,
        cumulative_sequence_lengths=np.concatenate([[0], ends]).astype(np.int32),
        past_sequence_lengths=plan.past.astype(np.int32),
        block_table=_proposed_table(control, plan),
        attention_metadata=attention_metadata(plan.past, plan.num_tokens),
    )


def attention_metadata(past: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Returns a step's exact bounds.

    Args:
        past: int[rows], committed tokens of each row.
        num_tokens: int[rows], tokens of each row in this step.

    Returns:
        int32[3], the longest query, the longest KV length, and that length again as its lower bound.

    Raises:
        ValueError: There are no rows, the arrays do not match, a row has no tokens, or a length is outside int32.
    """
    counts = _per_row("num_tokens", num_tokens, 1)
    longest = int((_per_row("past", past, 0, len(counts)) + counts).max())
    _require_int32("the longest KV length", longest, "shorten the longest row")
    return np.array([counts.max(), longest, longest], np.int32)


def table_bucket(columns: int, capacity: int) -> int:
    """Returns the smallest bucket of table widths that holds `columns`: a power of two from 8 up, or the capacity.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is out of range, or `columns` exceeds `capacity`.
    """
    columns, capacity = _positive("columns", columns), _positive("capacity", capacity)
    if columns > capacity:
        raise ValueError(
            f"a table of {columns} columns exceeds the capacity of {capacity}; raise the capacity"
        )
    return min(max(SMALLEST_TABLE_BUCKET, 1 << (columns - 1).bit_length()), capacity)


def bucket_metadata(
    past: np.ndarray, table_lengths: np.ndarray, *, block_size: int, capacity: int, exact_tables: bool = True
) -> np.ndarray:
    """Returns the bounds that hold for every decode step in the same bucket of table widths as this one.

    The step's block table is to be padded to `table_bucket` columns of its longest table.

    Args:
        past: int[rows], committed tokens of each row, which decodes one more.
        table_lengths: int[rows], blocks in each row's table.
        block_size: Token slots in a block.
        capacity: Columns of the widest table there can be.
        exact_tables: Whether a table of this bucket never has more blocks than its row's KV length needs.

    Returns:
        int32[3], upper bounds on the longest query and KV length, and a lower bound on the longest KV length.

    Raises:
        TypeError: `block_size` or `capacity` is no integer.
        ValueError: There are no rows, the arrays do not match, a table does not hold its row or is longer than it was
            said to be, or a bound is outside int32.
    """
    block_size = _positive("block_size", block_size)
    lengths = _per_row("table_lengths", table_lengths, 1)
    kv_lengths = _per_row("past", past, 0, len(lengths)) + 1
    needed = blocks_for(kv_lengths, block_size)
    short, long = lengths < needed, lengths > needed
    if short.any():
        raise ValueError(
            f"the table of {_row_and_blocks(short, lengths, needed)}; reserve what is missing first"
        )
    if exact_tables and long.any():
        raise ValueError(f"the table of {_row_and_blocks(long, lengths, needed)}; pass exact_tables=False")
    bucket = table_bucket(int(lengths.max()), capacity)
    _require_int32("the bucket's KV length", bucket * block_size, "lower the capacity or the block size")
    smallest = bucket <= SMALLEST_TABLE_BUCKET
    # Only exact tables tell a length: the longest row has outgrown the preceding bucket, which is a power of two even
    # where the capacity cuts this one short.
    preceding = 0 if smallest or not exact_tables else 1 << ((bucket - 1).bit_length() - 1)
    return np.array([1, bucket * block_size, preceding * block_size + 1], np.int32)


def logits_rows(cumulative_sequence_lengths: np.ndarray, wanted: np.ndarray | int = 1) -> np.ndarray:
    """Returns which packed rows of logits are read: the last ones of each row.

    Args:
        cumulative_sequence_lengths: int[rows + 1], rising from 0.
        wanted: int[rows] or one for all, how many each: 1 to sample, K + 1 to verify K drafts.

    Returns:
        int32[sum of `wanted`], ascending.

    Raises:
        ValueError: The arrays do not match, or a row has fewer tokens than wanted of it, or none are wanted.
    """
    boundaries = _per_row("cumulative_sequence_lengths", cumulative_sequence_lengths, 0)
    counts = np.diff(boundaries)
    if len(counts) == 0 or boundaries[0] != 0 or (counts < 1).any():
        raise ValueError(
            "cumulative_sequence_lengths does not rise from 0; give at least one row, each with tokens"
        )
    each = _per_row(
        "wanted", np.full(len(counts), wanted) if np.ndim(wanted) == 0 else wanted, 1, len(counts)
    )
    if (each > counts).any():
        row = np.flatnonzero(each > counts)[0]
        raise ValueError(
            f"{each[row]} logits rows are wanted of row {row}, which has {counts[row]} tokens; want fewer"
        )
    first = boundaries[1:] - each
    return (np.arange(each.sum()) + np.repeat(first - (np.cumsum(each) - each), each)).astype(np.int32)


def _proposed_table(control: Control, plan: StepPlan) -> np.ndarray:
    held = control.blocks_held[plan.index]
    lengths = held + plan.num_reserved
    table = np.full((len(lengths), int(lengths.max())), HOLE, np.int32)
    for i, row in enumerate(plan.index.tolist()):
        table[i, : held[i]] = control.blocks.read(row, 0, int(held[i]))
    column = np.arange(table.shape[1])
    table[(column >= held[:, None]) & (column < lengths[:, None])] = plan.reserved
    return table


def _per_row(label: str, values: np.ndarray | int, low: int, rows: int | None = None) -> np.ndarray:
    """Returns `values` as int64, in which two of them add up without overflow."""
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu" or rows not in (None, len(found)):
        raise ValueError(f"{label} is {found.dtype}{list(found.shape)}; give one integer a row")
    if len(found) == 0:
        raise ValueError(f"{label} is empty; give at least one row")
    wrong = np.flatnonzero((found < low) | (found > INT32_MAX))
    if len(wrong):
        raise ValueError(f"{label}[{wrong[0]}] is {found[wrong[0]]}; give a value from {low} to {INT32_MAX}")
    return found.astype(np.int64)


def _positive(label: str, value: int) -> int:
    number = require_count(label, value)
    if number == 0:
        raise ValueError(f"{label} is 0; give at least 1")
    return number


def _require_int32(label: str, bound: int, remedy: str) -> None:
    if bound > INT32_MAX:
        raise ValueError(f"{label} is {bound} and does not fit int32; {remedy}")


def _row_and_blocks(wrong: np.ndarray, lengths: np.ndarray, needed: np.ndarray) -> str:
    row = np.flatnonzero(wrong)[0]
    return f"row {row} has {lengths[row]} blocks where its KV length needs {needed[row]}"
