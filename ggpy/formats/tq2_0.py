"""TQ2_0: 256 ternary digits of two bits each and one scale; w = d * (q - 1)."""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, register
from .bits import (
    finite_or_zero,
    inverse_or_zero,
    largest_magnitude,
    pack,
    round_half_away,
    scaled,
    unpack,
)

QK_K = 256
block_tq2_0 = np.dtype([("qs", "u1", QK_K // 4), ("d", "<f2")])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 32 * h + j has weights 128 * h + j + (0, 32, 64, 96)."""
    q = unpack(blocks["qs"].reshape(-1, 2, 32), 2).astype(np.int8) - np.int8(1)
    return scaled(blocks["d"].astype(np.float32)[:, None], q)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]: d is the largest magnitude (ggml quantize_row_tq2_0_ref)."""
    blocks = np.empty(len(weights), block_tq2_0)
    blocks["d"], q = quantize_ternary(weights)
    blocks["qs"] = pack(q.reshape(-1, 2, 4, 32), 2).reshape(-1, QK_K // 4)
    return blocks


def quantize_ternary(weights: F32) -> tuple[F32, U8]:
    """weights[n, 256] -> scales d[n] and q[n, 256] in 0..2, w = d * (q - 1); shared with TQ1_0."""
    d = largest_magnitude(weights)
    inverse = finite_or_zero(inverse_or_zero(d))
    return d, (round_half_away(weights * inverse[:, None]) + np.int8(1)).view(np.uint8)


# Tiles have 2.5 bits for each weight: a scale for each 32.
TQ2_0 = register(Format("TQ2_0", 35, QK_K, block_tq2_0, dequantize, quantize, tile=(2, 32, "D")))
