"""Q5_K: 256 five-bit numbers; each 32 have a 6-bit scale and a 6-bit minimum; w = d * scale * q -
dmin * minimum.
"""

from __future__ import annotations

import numpy as np

from . import k_scales
from .base import F32, U8, Blocks, Format, register
from .bits import pack, scaled_and_shifted, unpack

QK_K = 256
block_q5_K = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", 12),
        ("qh", "u1", QK_K // 8),
        ("qs", "u1", QK_K // 2),
    ]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs as in Q4_K, bit i of byte j of qh belongs to weight 32 * i +
    j.
    """
    low = unpack(blocks["qs"].reshape(-1, 4, 32), 4).reshape(-1, QK_K)
    high = unpack(blocks["qh"], 1).reshape(-1, QK_K)
    scales, minimums = k_scales.scales_and_minimums(blocks)
    return scaled_and_shifted(scales, low | high << 4, minimums)


def pack_quants(blocks: Blocks, q: U8) -> None:
    """Stores q[n, 256] in 0..31, in place."""
    blocks["qs"] = pack((q & np.uint8(15)).reshape(-1, 4, 2, 32), 4).reshape(-1, QK_K // 2)
    blocks["qh"] = pack((q >> np.uint8(4)).reshape(-1, 8, 32), 1)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n] (ggml quantize_row_q5_K_ref)."""
    blocks = np.empty(len(weights), block_q5_K)
    pack_quants(blocks, k_scales.quantize(blocks, weights, 31, (-0.5, 0.1, 15)))
    return blocks


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_row_q5_K_impl)."""
    blocks = np.empty(len(weights), block_q5_K)
    pack_quants(blocks, k_scales.quantize_weighted(blocks, weights, importance, 31))
    return blocks


Q5_K = register(
    Format(
        "Q5_K",
        13,
        QK_K,
        block_q5_K,
        dequantize,
        quantize,
        quantize_weighted,
        tile=(5, 32, "SUB_M6"),
        searches=True,
    )
)
