"""IQ2_XS: 256 weights as 32 points of a 512-point grid with 7 sign bits each; each 16 weights have
a 4-bit scale.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack_in_place
from .grids import IQ2_VALUES, even_signs, signed_points

QK_K = 256
block_iq2_xs = np.dtype([("d", "<f2"), ("qs", "<u2", QK_K // 8), ("scales", "u1", QK_K // 32)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs has an index in its low nine bits, and signs above them."""
    values = signed_points("IQ2_XS", blocks["qs"] & 511, even_signs(blocks["qs"] >> 9))
    return scaled(scales(blocks), values)


def scales(blocks: Blocks) -> F32:
    """blocks[n] -> d * (0.5 + scale) / 4 of each 16 weights, [n, 16]; shared with IQ2_S."""
    factors = np.float32(0.5) + unpack_in_place(blocks["scales"], 4)
    return blocks["d"].astype(np.float32)[:, None] * factors * np.float32(0.25)


IQ2_XS = register(
    Format(
        *("IQ2_XS", 17, QK_K, block_iq2_xs, dequantize),
        tile=(3, 16, "SUB_8"),  # 3.6 bits for each weight instead of 2.3
        tile_values=IQ2_VALUES,
    )
)
