"""Q6_K: 256 six-bit numbers; each 16 have a signed 8-bit scale; w = d * scale * (q - 32)."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import scaled, unpack

QK_K = 256
block_q6_K = np.dtype(
    [("ql", "u1", QK_K // 2), ("qh", "u1", QK_K // 4), ("scales", "i1", QK_K // 16), ("d", "<f2")]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256].

    For each half h: byte 64 * h + j of ql has weights 128 * h + j + (0, 64), byte 32 * h + j of qh
    has weights 128 * h + j + (0, 32, 64, 96).
    """
    low = unpack(blocks["ql"].reshape(-1, 2, 64), 4).reshape(-1, QK_K)
    high = unpack(blocks["qh"].reshape(-1, 2, 32), 2).reshape(-1, QK_K)
    q = (low | high << 4).astype(np.int8) - np.int8(32)
    return scaled(blocks["d"].astype(np.float32)[:, None] * blocks["scales"], q)


Q6_K = register(Format("Q6_K", 14, QK_K, block_q6_K, dequantize))
