"""Q4_1: 32 nibbles, a scale and a minimum; w = d * q + m."""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, register
from .bits import inverse_or_zero, pack, scaled_and_shifted, unpack
from .search import aligned, row_error_weights, search_scale_and_minimum

QK4_1 = 32
block_q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", QK4_1 // 2)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; byte j has weights j and j + 16."""
    d, m = (blocks[field].astype(np.float32)[:, None] for field in ("d", "m"))
    return scaled_and_shifted(d, unpack(blocks["qs"], 4), m)


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: minimum and maximum become 0 and 15 (ggml
    quantize_row_q4_1_ref).
    """
    d, m, q = quantize_by_range(weights, 15)
    blocks = np.empty(len(weights), block_q4_1)
    blocks["d"], blocks["m"], blocks["qs"] = d, m, pack(q.reshape(-1, 2, QK4_1 // 2), 4)
    return blocks


def quantize_by_range(weights: F32, largest: int) -> tuple[F32, F32, U8]:
    """weights[n, 32] -> scales d[n], minimums m[n] and q[n, 32] in 0..largest, for w = d * q + m.

    Shared with Q5_1.
    """
    # The first minimum: ggml keeps the sign of the first zero.
    m = np.take_along_axis(weights, weights.argmin(axis=1)[:, None], axis=1)
    d = np.abs(weights.max(axis=1, keepdims=True) - m) / np.float32(largest)
    inverse = inverse_or_zero(d)
    q = np.minimum((weights - m) * inverse + np.float32(0.5), largest).astype(np.uint8)
    q[np.isinf(inverse[:, 0])] = 0
    return d[:, 0], m[:, 0], q


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 32], importance[m, 32] -> blocks[n] (ggml quantize_row_q4_1_impl)."""
    d, m, q = search_by_importance(weights, importance, 15)
    blocks = np.empty(len(weights), block_q4_1)
    blocks["d"], blocks["m"], blocks["qs"] = d, m, pack(q.reshape(-1, 2, QK4_1 // 2), 4)
    return blocks


def search_by_importance(weights: F32, importance: F32, largest: int) -> tuple[F32, F32, U8]:
    """Like `quantize_by_range`, with the scale and minimum of the least error; shared with Q5_1."""
    errors = aligned(row_error_weights(weights, importance).T)
    x, steps = aligned(weights.T), (-0.9, 0.05, 36)
    d, m, q = search_scale_and_minimum(x, errors, largest, steps, "weighted")
    return d, m, q.T.astype(np.uint8)


Q4_1 = register(
    Format(
        "Q4_1", 3, QK4_1, block_q4_1, dequantize, quantize, quantize_weighted, tile=(4, 32, "DM")
    )
)
