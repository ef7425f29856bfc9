"""IQ3_S: 256 weights as 64 points of a 512-point grid with 4 sign bits each; each 32 weights have a
4-bit scale.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack_in_place
from .grids import signed_points

QK_K = 256
block_iq3_s = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", QK_K // 4),
        ("qh", "u1", QK_K // 32),
        ("signs", "u1", QK_K // 8),
        ("scales", "u1", QK_K // 64),
    ]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs has the low byte, qh the ninth bit of an index; d * (1 + 2 *
    scale).
    """
    indices = blocks["qs"] | unpack_in_place(blocks["qh"], 1).astype(np.uint16) << 8
    factors = 1 + 2 * unpack_in_place(blocks["scales"], 4)
    d = blocks["d"].astype(np.float32)[:, None] * factors
    return scaled(d, signed_points("IQ3_S", indices, blocks["signs"]))


IQ3_S = register(Format("IQ3_S", 21, QK_K, block_iq3_s, dequantize))
