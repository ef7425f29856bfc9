"""Q2_K: 256 two-bit numbers; each 16 have a 4-bit scale and a 4-bit minimum; w = d * scale * q -
dmin * minimum.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled_and_shifted, unpack

QK_K = 256
block_q2_K = np.dtype(
    [("scales", "u1", QK_K // 16), ("qs", "u1", QK_K // 4), ("d", "<f2"), ("dmin", "<f2")]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 32 * h + j of qs has weights 128 * h + j + (0, 32, 64,
    96).
    """
    d, dmin = (blocks[field].astype(np.float32)[:, None] for field in ("d", "dmin"))
    scales, minimums = blocks["scales"] & 15, blocks["scales"] >> 4
    q = unpack(blocks["qs"].reshape(-1, 2, 32), 2)
    return scaled_and_shifted(d * scales, q, -(dmin * minimums))


Q2_K = register(Format("Q2_K", 10, QK_K, block_q2_K, dequantize))
