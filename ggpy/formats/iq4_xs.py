"""IQ4_XS: 256 codes of IQ4_NL's table; each 32 a 6-bit scale; w = d * (scale - 32) * table[q]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack, unpack_in_place
from .iq4_nl import VALUES

QK_K = 256
block_iq4_xs = np.dtype(
    [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", QK_K // 64), ("qs", "u1", QK_K // 2)]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 16 * g + j has weights 32 * g + j + (0, 16)."""
    d = blocks["d"].astype(np.float32)[:, None] * unpack_scales(blocks)
    return scaled(d, VALUES[unpack(blocks["qs"].reshape(-1, 8, 16), 4)])


def unpack_scales(blocks: Blocks) -> NDArray[np.int8]:
    """blocks[n] -> [n, 8] in -32..31: nibbles of scales_l, two bits more in scales_h."""
    low = unpack_in_place(blocks["scales_l"], 4)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    return (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)


IQ4_XS = register(Format("IQ4_XS", 23, QK_K, block_iq4_xs, dequantize))
