"""IQ2_S: 256 weights as 32 points of a 1024-point grid with 8 sign bits each; each 16 weights have
a 4-bit scale.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack_in_place
from .grids import IQ2_VALUES, signed_points
from .iq2_xs import scales

QK_K = 256
block_iq2_s = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", QK_K // 4),
        ("qh", "u1", QK_K // 32),
        ("scales", "u1", QK_K // 32),
    ]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs has the low bytes of 32 indices, then 32 sign bytes; qh two
    more bits an index.
    """
    low, signs = blocks["qs"][:, :32], blocks["qs"][:, 32:]
    indices = low | unpack_in_place(blocks["qh"], 2).astype(np.uint16) << 8
    return scaled(scales(blocks), signed_points("IQ2_S", indices, signs))


IQ2_S = register(
    Format(
        *("IQ2_S", 22, QK_K, block_iq2_s, dequantize),
        tile=(3, 16, "SUB_8"),  # 3.6 bits for each weight instead of 2.6
        tile_values=IQ2_VALUES,
    )
)
