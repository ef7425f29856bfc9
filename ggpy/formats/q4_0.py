"""Q4_0: 32 nibbles and one scale; w = d * (q - 8)."""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, register
from .bits import inverse_or_zero, pack, scaled, unpack
from .search import aligned, row_error_weights, search_scale

QK4_0 = 32
block_q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", QK4_0 // 2)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; byte j has weights j and j + 16."""
    q = unpack(blocks["qs"], 4).astype(np.int8) - np.int8(8)
    return scaled(blocks["d"].astype(np.float32)[:, None], q)


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: the extreme one becomes -8 (ggml quantize_row_q4_0_ref)."""
    d, q = quantize_by_extreme(weights, 8)
    blocks = np.empty(len(weights), block_q4_0)
    blocks["d"], blocks["qs"] = d, pack(q.reshape(-1, 2, QK4_0 // 2), 4)
    return blocks


def quantize_by_extreme(weights: F32, offset: int) -> tuple[F32, U8]:
    """weights[n, 32] -> scales d[n] and q[n, 32] in 0..2 * offset - 1, for w = d * (q - offset).

    The weight of the largest magnitude becomes q = 0. Shared with Q5_0.
    """
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=1)[:, None], axis=1)
    extreme += np.float32(0)  # no negative zero
    d = extreme / np.float32(-offset)
    inverse = inverse_or_zero(d)
    q = np.minimum(weights * inverse + np.float32(offset + 0.5), 2 * offset - 1).astype(np.uint8)
    q[np.isinf(inverse[:, 0])] = 0
    return d[:, 0], q


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 32], importance[m, 32] -> blocks[n] (ggml quantize_row_q4_0_impl)."""
    errors = aligned(row_error_weights(weights, importance).T)
    d, q = search_scale(aligned(weights.T), errors, 8)
    blocks = np.empty(len(weights), block_q4_0)
    blocks["d"] = d
    blocks["qs"] = pack((q.T + np.float32(8)).astype(np.uint8).reshape(-1, 2, QK4_0 // 2), 4)
    return blocks


Q4_0 = register(
    Format("Q4_0", 2, QK4_0, block_q4_0, dequantize, quantize, quantize_weighted, tile=(4, 32, "D"))
)
