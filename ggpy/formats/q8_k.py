"""Q8_K: 256 signed bytes, an f32 scale, and the sums of each 16; w = d * q. What ggml quantises
activations to for K types.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import finite_or_zero, scaled

QK_K = 256
block_q8_K = np.dtype([("d", "<f4"), ("qs", "i1", QK_K), ("bsums", "<i2", QK_K // 16)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; bsums are not needed."""
    return scaled(blocks["d"].astype(np.float32)[:, None], blocks["qs"])


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]: the largest becomes -127 (ggml quantize_row_q8_K_ref)."""
    blocks = np.zeros(len(weights), block_q8_K)
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=1)[:, None], axis=1)
    inverse = np.float32(-127) / extreme
    blocks["d"] = np.where(extreme != 0, np.float32(1) / inverse, np.float32(0))[:, 0]
    blocks["qs"] = np.minimum(np.rint(weights * finite_or_zero(inverse)), 127)
    derive_sums(blocks)
    return blocks


def derive_sums(blocks: Blocks) -> None:
    """Sets bsums of blocks whose qs are set."""
    blocks["bsums"] = blocks["qs"].reshape(-1, QK_K // 16, 16).sum(axis=2, dtype=np.int16)


Q8_K = register(
    Format("Q8_K", 15, QK_K, block_q8_K, dequantize, quantize, derive_fields=derive_sums)
)
