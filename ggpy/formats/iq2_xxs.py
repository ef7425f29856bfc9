"""IQ2_XXS: 256 weights as 32 points of a 256-point grid; each 32 weights have a 4-bit scale and 4 x
7 sign bits.
"""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, register
from .bits import scaled
from .grids import IQ2_VALUES, even_signs, signed_points

QK_K = 256
block_iq2_xxs = np.dtype([("d", "<f2"), ("qs", "<u2", QK_K // 8)])

SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; each 32 weights have two 32-bit words: four indices, then signs
    and scale.
    """
    words = blocks["qs"].view("<u4").reshape(-1, 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scales, signs = unpack_scales_and_signs(words[:, :, 1])
    d = blocks["d"].astype(np.float32)[:, None] * scales * np.float32(0.25)
    return scaled(d, signed_points("IQ2_XXS", indices, signs))


def unpack_scales_and_signs(
    words: np.ndarray[tuple[int, ...], np.dtype[np.uint32]],
) -> tuple[F32, U8]:
    """words[n, 8] -> 0.5 + the upper four bits, [n, 8], and the sign bytes, [n, 32]; shared with
    IQ3_XXS.
    """
    codes = words[:, :, None] >> SIGN_SHIFTS & np.uint32(127)
    scales = np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)
    return scales, even_signs(codes.reshape(len(words), -1))


IQ2_XXS = register(
    Format(
        *("IQ2_XXS", 16, QK_K, block_iq2_xxs, dequantize),
        # 3.3 bits for each weight instead of 2.1: signed numbers of the grid, one by one
        tile=(3, 32, "SUB_8"),
        tile_values=IQ2_VALUES,
    )
)
