"""Q5_1: 32 five-bit numbers, a scale and a minimum; w = d * q + m."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled_and_shifted
from .q4_1 import quantize_by_range, search_by_importance
from .q5_0 import pack_quants, unpack_quants

QK5_1 = 32
block_q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", QK5_1 // 2)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]."""
    d, m = (blocks[field].astype(np.float32)[:, None] for field in ("d", "m"))
    return scaled_and_shifted(d, unpack_quants(blocks), m)


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: minimum and maximum become 0 and 31 (ggml
    quantize_row_q5_1_ref).
    """
    blocks = np.empty(len(weights), block_q5_1)
    blocks["d"], blocks["m"], q = quantize_by_range(weights, 31)
    pack_quants(blocks, q)
    return blocks


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 32], importance[m, 32] -> blocks[n] (ggml quantize_row_q5_1_impl)."""
    blocks = np.empty(len(weights), block_q5_1)
    blocks["d"], blocks["m"], q = search_by_importance(weights, importance, 31)
    pack_quants(blocks, q)
    return blocks


Q5_1 = register(
    Format(
        "Q5_1", 7, QK5_1, block_q5_1, dequantize, quantize, quantize_weighted, tile=(5, 32, "DM")
    )
)
