"""IQ4_NL: 32 codes of a fixed, uneven 16-value table and one scale; w = d * table[q]."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack

QK4_NL = 32
block_iq4_nl = np.dtype([("d", "<f2"), ("qs", "u1", QK4_NL // 2)])

# ggml's kvalues_iq4nl; shared with IQ4_XS.
VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; byte j has weights j and j + 16."""
    return scaled(blocks["d"].astype(np.float32)[:, None], VALUES[unpack(blocks["qs"], 4)])


IQ4_NL = register(Format("IQ4_NL", 20, QK4_NL, block_iq4_nl, dequantize))
