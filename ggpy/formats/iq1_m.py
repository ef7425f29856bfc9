"""IQ1_M: 256 weights as 32 points of IQ1_S's grid, each shifted by +-1/8; each 16 weights have a
3-bit scale.

Its f16 scale d is no field: each 16-bit word of `scales` has four 3-bit scales and, above them, a
nibble of d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, Blocks, Format, ScaleCodec, register
from .bits import scaled, unpack_in_place
from .grids import points
from .iq1_s import IQ1_DELTA, SHIFTED_DIGITS

QK_K = 256
block_iq1_m = np.dtype(
    [("qs", "u1", QK_K // 8), ("qh", "u1", QK_K // 16), ("scales", "u1", QK_K // 32)]
)

NIBBLE_SHIFTS = np.array([0, 4, 8, 12], np.uint16)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; a nibble of qh has three high bits of an index and the sign of
    its shift.
    """
    nibbles = unpack_in_place(blocks["qh"], 4)
    indices = blocks["qs"] | (nibbles & 7).astype(np.uint16) << 8
    values = points("IQ1_M", indices).reshape(-1, 32, 8)
    values += np.where(nibbles >> 3, -IQ1_DELTA, IQ1_DELTA)[:, :, None]
    scales = scale_words(blocks)[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    return scaled(read_scales(blocks) * (2 * scales.reshape(-1, 16) + 1), values)


def scale_words(blocks: Blocks) -> NDArray[np.uint16]:
    """blocks[n] -> [n, 4], a view."""
    words: NDArray[np.uint16] = blocks["scales"].view("<u2")
    return words


def read_scales(blocks: Blocks) -> F32:
    """blocks[n] -> d[n, 1]."""
    nibbles = scale_words(blocks) >> np.uint16(12) << NIBBLE_SHIFTS
    bits: NDArray[np.uint16] = np.bitwise_or.reduce(nibbles, axis=1)
    return bits.view(np.float16).astype(np.float32)[:, None]


def write_scales(blocks: Blocks, scales: F32) -> None:
    """d[n, 1] as f16, a nibble a word."""
    bits = scales.astype(np.float16).view(np.uint16)
    scale_words(blocks)[:] = scale_words(blocks) & 0x0FFF | bits >> NIBBLE_SHIFTS << 12


IQ1_M = register(
    Format(
        *("IQ1_M", 29, QK_K, block_iq1_m, dequantize),
        scale_codec=ScaleCodec(read_scales, write_scales),
        tile=(3, 16, "SUB_8"),  # 3.6 bits for each weight instead of 1.8
        tile_values=SHIFTED_DIGITS,
    )
)
