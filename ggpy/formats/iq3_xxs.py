"""IQ3_XXS: 256 weights as 64 points of a 256-point grid; each 32 weights have a 4-bit scale and 4 x
7 sign bits.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled
from .grids import signed_points
from .iq2_xxs import unpack_scales_and_signs

QK_K = 256
block_iq3_xxs = np.dtype([("d", "<f2"), ("qs", "u1", 3 * QK_K // 8)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs has 64 indices, then eight 32-bit words: signs, scale."""
    indices, words = blocks["qs"][:, :64], blocks["qs"][:, 64:].view("<u4")
    scales, signs = unpack_scales_and_signs(words)
    d = blocks["d"].astype(np.float32)[:, None] * scales * np.float32(0.5)
    return scaled(d, signed_points("IQ3_XXS", indices, signs))


IQ3_XXS = register(
    Format(
        *("IQ3_XXS", 18, QK_K, block_iq3_xxs, dequantize),
        tile=(4, 32, "SUB_8"),  # 4.3 bits for each weight instead of 3.1
        tile_values=(-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62),
    )
)
