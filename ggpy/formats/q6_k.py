"""Q6_K: 256 six-bit numbers; each 16 have a signed 8-bit scale; w = d * scale * (q - 32)."""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import pack, scaled, unpack
from .search import ALL_ZERO, aligned, first_extreme, nearest_int, requantize, search_scale, tiled

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


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]; an error counts by the weight squared (ggml
    quantize_row_q6_K_ref).
    """
    x = aligned(weights.reshape(-1, 16).T)
    return _blocks(weights, *search_scale(x, aligned(x * x), 32))


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_row_q6_K_impl)."""
    x, errors = (aligned(a.reshape(-1, 16).T) for a in (weights, tiled(importance, weights)))
    return _blocks(weights, *search_scale(x, errors, 32))


def _blocks(weights: F32, scales: F32, found: F32) -> Blocks:
    """Blocks of weights[n, 256] from the best scales[16 n] of their groups, which are rounded here;
    found[16, 16 n] as in `requantize`.
    """
    scales = scales.reshape(-1, 16)
    extreme = first_extreme(scales.T)[:, None]
    inverse = np.float32(-128) / extreme
    blocks = np.zeros(len(weights), block_q6_K)
    blocks["d"] = (np.float32(1) / inverse)[:, 0]
    blocks["scales"] = np.minimum(nearest_int(inverse * scales), np.float32(127))
    group_scales = blocks["d"].astype(np.float32)[:, None] * blocks["scales"]
    q = (requantize(weights, group_scales, 0.0, found, -32, 31) + np.int8(32)).view(np.uint8)
    blocks["ql"] = pack((q & np.uint8(15)).reshape(-1, 2, 2, 64), 4).reshape(-1, QK_K // 2)
    blocks["qh"] = pack((q >> np.uint8(4)).reshape(-1, 2, 4, 32), 2).reshape(-1, QK_K // 4)
    blocks[np.abs(extreme[:, 0]) < ALL_ZERO] = np.zeros((), block_q6_K)
    return blocks


Q6_K = register(
    Format(
        "Q6_K",
        14,
        QK_K,
        block_q6_K,
        dequantize,
        quantize,
        quantize_weighted,
        tile=(6, 16, "SUB"),
        searches=True,
    )
)
