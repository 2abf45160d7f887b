"""Block-quantised matrices as files hold them: packed codes, scales and zero points to floats, in NumPy.

A code of 2, 4 or 8 bits takes the lowest free bits of its byte. Each row begins with a new byte, for zero points too.
A weight is (code - zero point) * scale of its block, and an absent zero point means half the range.
"""

import numpy as np

BLOCK_SIZES = tuple(1 << power for power in range(4, 31))
"""Powers of two from 16 on; a block may be longer than its row."""
BITS = (2, 4, 8)


def unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes of each row of bytes [..., bytes], lowest bits first: uint8 [..., count]."""
    if bits == 8:
        return data[..., :count]
    mask = np.uint8((1 << bits) - 1)
    fields = [(data >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    return np.stack(fields, axis=-1).reshape(*data.shape[:-1], -1)[..., :count]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The bytes [..., packed_bytes(count)] of codes uint8 [..., count]; the inverse of `unpack`."""
    fields = 8 // bits
    missing = -codes.shape[-1] % fields
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    shifted = (padded[..., field::fields] << np.uint8(field * bits) for field in range(fields))
    return np.bitwise_or.reduce(list(shifted))


def packed_bytes(count: int, bits: int) -> int:
    """The bytes that a row of `count` codes takes."""
    return -(-count * bits // 8)


def dequantise(
    data: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    *,
    bits: int,
    block_size: int,
    rows: int,
    columns: int,
) -> np.ndarray:
    """The float matrix [rows, columns] behind MatMulNBits' B, scales and zero points: (code - zero) * scale.

    Rows are whole blocks in the file and are cut to `columns`; absent zero points mean half the range. Computed in
    float32 and rounded once, to the type of the scales.
    """
    blocks = -(-columns // block_size)
    scales = scales.reshape(rows, blocks)
    codes = unpack(data.reshape(rows, -1), bits, blocks * block_size).reshape(rows, blocks, block_size)
    zeros = zero_values(zero_points, scales.shape, bits)[:, :, None]
    values = (codes.astype(np.float32) - zeros) * scales.astype(np.float32)[:, :, None]
    return values.reshape(rows, -1)[:, :columns].astype(scales.dtype, copy=False)


def zero_values(zero_points: np.ndarray | None, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Zero points as float32 of the scales' shape [..., blocks]: absent, packed in uint8 by row, or already float."""
    if zero_points is None:
        return np.full(shape, 1 << (bits - 1), np.float32)
    if zero_points.dtype == np.uint8:
        zero_points = unpack(zero_points.reshape(*shape[:-1], -1), bits, shape[-1])
    return zero_points.reshape(shape).astype(np.float32)
