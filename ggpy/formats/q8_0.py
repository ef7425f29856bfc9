"""Q8_0: 32 signed bytes and one scale; w = d * q."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, Blocks, Format, register
from .bits import finite_or_zero, inverse_or_zero, largest_magnitude, round_half_away, scaled

QK8_0 = 32
block_q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", QK8_0)])


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]."""
    return scaled(blocks["d"].astype(np.float32)[:, None], blocks["qs"])


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: d = amax / 127 (ggml quantize_row_q8_0_ref)."""
    blocks = np.empty(len(weights), block_q8_0)
    blocks["d"], blocks["qs"] = quantize_int8(weights)
    return blocks


def quantize_int8(weights: F32) -> tuple[F32, NDArray[np.int8]]:
    """weights[n, 32] -> scales d[n] in f32 and signed bytes q[n, 32]; shared with Q8_1."""
    d = largest_magnitude(weights) / np.float32(127)
    inverse = finite_or_zero(inverse_or_zero(d))
    return d, round_half_away(weights * inverse[:, None])


Q8_0 = register(Format("Q8_0", 8, QK8_0, block_q8_0, dequantize, quantize, tile=(8, 32, "D")))
