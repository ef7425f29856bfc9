"""Q1_0: 128 signs and one scale; w = d or -d."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack_in_place

QK1_0 = 128
block_q1_0 = np.dtype([("d", "<f2"), ("qs", "u1", QK1_0 // 8)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 128]; byte j has weights 8 * j and up, and 1 stands for plus."""
    q = unpack_in_place(blocks["qs"], 1).astype(np.int8) * np.int8(2) - np.int8(1)
    return scaled(blocks["d"].astype(np.float32)[:, None], q)


# Tiles have 2.5 bits for each weight: no tile has 1-bit codes, and each 32 weights have a scale.
Q1_0 = register(Format("Q1_0", 41, QK1_0, block_q1_0, dequantize, tile=(2, 32, "D")))
