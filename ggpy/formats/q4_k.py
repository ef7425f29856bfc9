"""Q4_K: 256 nibbles; each 32 have a 6-bit scale and a 6-bit minimum; w = d * scale * q - dmin *
minimum.
"""

from __future__ import annotations

import numpy as np

from . import k_scales
from .base import F32, Blocks, Format, register
from .bits import pack, scaled_and_shifted, unpack

QK_K = 256
block_q4_K = np.dtype(
    [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", QK_K // 2)]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 32 * h + j of qs has weights 64 * h + j + (0, 32)."""
    scales, minimums = k_scales.scales_and_minimums(blocks)
    return scaled_and_shifted(scales, unpack(blocks["qs"].reshape(-1, 4, 32), 4), minimums)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n] (ggml quantize_row_q4_K_ref)."""
    blocks = np.empty(len(weights), block_q4_K)
    q = k_scales.quantize(blocks, weights, 15, (-1.0, 0.1, 20))
    blocks["qs"] = pack(q.reshape(-1, 4, 2, 32), 4).reshape(-1, QK_K // 2)
    return blocks


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_row_q4_K_impl)."""
    blocks = np.empty(len(weights), block_q4_K)
    q = k_scales.quantize_weighted(blocks, weights, importance, 15)
    blocks["qs"] = pack(q.reshape(-1, 4, 2, 32), 4).reshape(-1, QK_K // 2)
    return blocks


Q4_K = register(
    Format(
        "Q4_K",
        12,
        QK_K,
        block_q4_K,
        dequantize,
        quantize,
        quantize_weighted,
        tile=(4, 32, "SUB_M6"),
        searches=True,
    )
)
