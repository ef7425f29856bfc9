"""Q3_K: 256 three-bit numbers; each 16 have a 6-bit scale; w = d * (scale - 32) * (q - 4). The
third bits are in hmask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8, Blocks, Format, register
from .bits import scaled, unpack

QK_K = 256
block_q3_K = np.dtype(
    [("hmask", "u1", QK_K // 8), ("qs", "u1", QK_K // 4), ("scales", "u1", 12), ("d", "<f2")]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs as in Q2_K, bit i of byte j of hmask belongs to weight 32 *
    i + j.
    """
    low = unpack(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, QK_K)
    high = unpack(blocks["hmask"], 1).reshape(-1, QK_K)
    q = (low | high << 2).astype(np.int8) - np.int8(4)
    return scaled(blocks["d"].astype(np.float32)[:, None] * unpack_scales(blocks["scales"]), q)


def unpack_scales(scales: U8) -> NDArray[np.int8]:
    """scales[n, 12] -> [n, 16] in -32..31: four low bits in the first 8 bytes, two high bits in the
    last 4.
    """
    low = unpack(scales[:, :8], 4).reshape(-1, 16)
    high = unpack(scales[:, 8:], 2).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


Q3_K = register(Format("Q3_K", 11, QK_K, block_q3_K, dequantize))
