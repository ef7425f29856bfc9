"""Q2_0: 64 codes of two bits and one scale; w = d * (q - 1)."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack_in_place

QK2_0 = 64
block_q2_0 = np.dtype([("d", "<f2"), ("qs", "u1", QK2_0 // 4)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 64]; byte j has weights 4 * j to 4 * j + 3."""
    q = unpack_in_place(blocks["qs"], 2).astype(np.int8) - np.int8(1)
    return scaled(blocks["d"].astype(np.float32)[:, None], q)


# Tiles have 3.5 bits for each weight: two bits would mean -2 to 1, and each 32 have a scale.
Q2_0 = register(Format("Q2_0", 42, QK2_0, block_q2_0, dequantize, tile=(3, 32, "D")))
