"""IQ1_S: 256 weights as 32 points of a 2048-point ternary grid, shifted by +-1/8; each 32 weights
have a 3-bit scale.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled
from .grids import points

QK_K = 256
block_iq1_s = np.dtype([("d", "<f2"), ("qs", "u1", QK_K // 8), ("qh", "<u2", QK_K // 32)])

IQ1_DELTA = np.float32(0.125)  # of the grid's step; shared with IQ1_M


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qh has 4 x 3 high bits of indices, the scale, and the sign of
    the shift.
    """
    qh = blocks["qh"]
    high = qh[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    values = points("IQ1_S", blocks["qs"] | high.reshape(-1, 32) << 8).reshape(-1, 8, 32)
    values += np.where(qh >> 15, -IQ1_DELTA, IQ1_DELTA)[:, :, None]
    factors = 2 * (qh >> 12 & 7) + 1
    return scaled(blocks["d"].astype(np.float32)[:, None] * factors, values)


# A digit -1, 0 or 1, shifted up or down by 1/8, in eighths; shared with IQ1_M.
SHIFTED_DIGITS = (-9, -7, -1, 1, 7, 9)

IQ1_S = register(
    Format(
        *("IQ1_S", 19, QK_K, block_iq1_s, dequantize),
        # 3.3 bits for each weight instead of 1.6: shifted digits, one by one
        tile=(3, 32, "SUB_8"),
        tile_values=SHIFTED_DIGITS,
    )
)
