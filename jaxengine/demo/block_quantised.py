"""GGML's quantised blocks of 32 re-expressed as ONNX Runtime's block-quantised weights, value for value.

Formats: Q4_1 and Q8_0 of ggml (ggml-common.h); `MatMulNBits` and `GatherBlockQuantized` of ONNX Runtime's contributed
operators. Both sides are little-endian.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxengine.demo.gguf_reader import GgufTensor

BLOCK = 32  # values that share one scale, in both formats

_HALF = np.dtype("<f2")


@dataclass(frozen=True)
class BlockQuantised:
    """A matrix [rows, blocks * 32] whose values are (code - zero point) * scale, one scale and zero point a block.

    `codes` is uint8 [rows, blocks, 4 * bits], packed low bits first; `scales` and `zero_points` are float32
    [rows, blocks]. Without zero points the zero point is 2 ** (bits - 1).
    """

    bits: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.float32] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the dequantised matrix."""
        rows, blocks = self.scales.shape
        return rows, blocks * BLOCK

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [rows, columns], by the operators' arithmetic: subtract in float32, then multiply in float32."""
        codes = self.codes
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*self.scales.shape, BLOCK)
        zero: Any = np.float32(1 << (self.bits - 1))
        if self.zero_points is not None:
            zero = self.zero_points[..., None]
        return ((codes.astype(np.float32) - zero) * self.scales[..., None]).reshape(self.shape)


def from_q4_1(tensor: GgufTensor) -> BlockQuantised:
    """Q4_1 (code * d + m) as 4-bit codes with float zero points -m / d.

    Codes and scales are unchanged. The weight w = code * d + m itself is exact in float32; what differs is the rounding
    of the zero point, the subtraction and the product, together at most 2 ** -24 * (|m| + 2 |w|). (Searching the
    neighbouring floats of both for each block lowered the mean error by a twentieth only.) A block with d = 0 is
    constant: its codes become 0, its zero point -1 and its scale m, which is exact.
    """
    rows = tensor.data.shape[0]
    blocks = tensor.data.reshape(rows, -1, 4 + BLOCK // 2)
    delta = _halves(blocks[..., 0:2])
    minimum = _halves(blocks[..., 2:4])
    packed = blocks[..., 4:]  # byte j: element j low, element j + 16 high
    elements = np.concatenate([packed & 15, packed >> 4], axis=-1)
    constant = delta == 0
    elements[constant] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        zero_points = np.where(constant, np.float32(-1), -minimum / delta)
    codes = elements[..., 0::2] | elements[..., 1::2] << 4  # byte j: element 2j low, element 2j + 1 high
    return BlockQuantised(4, codes, np.where(constant, minimum, delta), zero_points)


def from_q8_0(tensor: GgufTensor) -> BlockQuantised:
    """Q8_0 (signed code * d) as unsigned 8-bit codes about the implied zero point 128: exact in float32."""
    rows = tensor.data.shape[0]
    blocks = tensor.data.reshape(rows, -1, 2 + BLOCK)
    return BlockQuantised(8, blocks[..., 2:] ^ np.uint8(128), _halves(blocks[..., 0:2]), None)


def stacked(parts: list[BlockQuantised]) -> BlockQuantised:
    """Matrices of equal width and format, one on top of the other."""
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    return BlockQuantised(
        parts[0].bits,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zero_points) if zero_points else None,
    )


def _halves(two_bytes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., 2] read as float16, widened to float32 [...]."""
    return np.ascontiguousarray(two_bytes).view(_HALF)[..., 0].astype(np.float32)
