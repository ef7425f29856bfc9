"""Q5_K: 256 five-bit numbers; each 32 have a 6-bit scale and a 6-bit minimum; w = d * scale * q -
dmin * minimum.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled_and_shifted, unpack
from .k_scales import scales_and_minimums

QK_K = 256
block_q5_K = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", 12),
        ("qh", "u1", QK_K // 8),
        ("qs", "u1", QK_K // 2),
    ]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs as in Q4_K, bit i of byte j of qh belongs to weight 32 * i +
    j.
    """
    low = unpack(blocks["qs"].reshape(-1, 4, 32), 4).reshape(-1, QK_K)
    high = unpack(blocks["qh"], 1).reshape(-1, QK_K)
    scales, minimums = scales_and_minimums(blocks)
    return scaled_and_shifted(scales, low | high << 4, minimums)


Q5_K = register(Format("Q5_K", 13, QK_K, block_q5_K, dequantize))
