"""Q2_K: 256 two-bit numbers; each 16 have a 4-bit scale and a 4-bit minimum; w = d * scale * q -
dmin * minimum.
"""

from __future__ import annotations

import numpy as np

from .base import F32, Blocks, Format, register
from .bits import pack, scaled_and_shifted, unpack
from .search import (
    aligned,
    error_weights,
    mean_square,
    nearest_int,
    ordered_sum,
    requantize,
    search_positive_scale,
    search_scale_and_minimum,
    tiled,
)

QK_K = 256
block_q2_K = np.dtype(
    [("scales", "u1", QK_K // 16), ("qs", "u1", QK_K // 4), ("d", "<f2"), ("dmin", "<f2")]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 32 * h + j of qs has weights 128 * h + j + (0, 32, 64,
    96).
    """
    scales, minimums = scales_and_minimums(blocks)
    return scaled_and_shifted(scales, unpack(blocks["qs"].reshape(-1, 2, 32), 2), minimums)


def scales_and_minimums(blocks: Blocks) -> tuple[F32, F32]:
    """blocks[n] -> d * scale and -dmin * minimum of each 16 weights, [n, 16] each."""
    d, dmin = (blocks[field].astype(np.float32)[:, None] for field in ("d", "dmin"))
    return d * (blocks["scales"] & 15), -(dmin * (blocks["scales"] >> 4))


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]; an error counts by its weight's magnitude (ggml
    quantize_row_q2_K_ref).
    """
    x = aligned(weights.reshape(-1, 16).T)
    search = search_scale_and_minimum(x, aligned(np.abs(x)), 3, (-0.5, 0.1, 15), "absolute")
    found = np.stack([search[0], -search[1]]).reshape(2, -1, 16)  # scales, minimums; [n, 16] each
    largest = np.maximum(found.max(axis=2), np.float32(0))
    inverse = np.where(largest > 0, np.float32(15) / largest, np.float32(0))
    levels = nearest_int(inverse[:, :, None] * found)
    return _blocks(weights, largest / np.float32(15), levels, search[2])


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_row_q2_K_impl)."""
    errors = error_weights(weights, tiled(importance, weights), mean_square(weights))
    x, errors = aligned(weights.reshape(-1, 16).T), aligned(errors.reshape(-1, 16).T)
    search = search_scale_and_minimum(x, errors, 3, (-0.9, 0.05, 36), "weighted")
    totals = aligned(ordered_sum(errors).reshape(-1, 16).T)
    scales = search_positive_scale(aligned(search[0].reshape(-1, 16).T), totals, 15)
    minimums = search_positive_scale(aligned(-search[1].reshape(-1, 16).T), totals, 15)
    levels = np.stack([scales[1].T, minimums[1].T])
    return _blocks(weights, np.stack([scales[0], minimums[0]]), levels, search[2])


def _blocks(weights: F32, d_and_dmin: F32, levels: F32, found: F32) -> Blocks:
    """Blocks of weights[n, 256] with these d_and_dmin[2, n] and levels[2, n, 16] of scales and
    minimums.

    A group whose scale became 0 keeps the found[16, 16 n].
    """
    blocks = np.empty(len(weights), block_q2_K)
    blocks["d"], blocks["dmin"] = d_and_dmin
    scales, minimums = levels.astype(np.int32).astype(np.uint8)
    blocks["scales"] = scales | minimums << np.uint8(4)
    group_scales, group_minimums = scales_and_minimums(blocks)
    q = requantize(weights, group_scales, group_minimums, found, 0, 3).view(np.uint8)
    blocks["qs"] = pack(q.reshape(-1, 2, 4, 32), 2).reshape(-1, QK_K // 4)
    return blocks


Q2_K = register(
    Format(
        *("Q2_K", 10, QK_K, block_q2_K, dequantize, quantize, quantize_weighted),
        searches=True,
        tile=(2, 16, "SUB_M4"),
    )
)
