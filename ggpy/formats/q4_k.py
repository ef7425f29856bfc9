"""Q4_K: 256 nibbles; each 32 have a 6-bit scale and a 6-bit minimum; w = d * scale * q - dmin *
minimum.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled_and_shifted, unpack
from .k_scales import scales_and_minimums

QK_K = 256
block_q4_K = np.dtype(
    [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", QK_K // 2)]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 32 * h + j of qs has weights 64 * h + j + (0, 32)."""
    scales, minimums = scales_and_minimums(blocks)
    return scaled_and_shifted(scales, unpack(blocks["qs"].reshape(-1, 4, 32), 4), minimums)


Q4_K = register(Format("Q4_K", 12, QK_K, block_q4_K, dequantize))
