"""Q3_K: 256 three-bit numbers; each 16 have a 6-bit scale; w = d * (scale - 32) * (q - 4). The
third bits are in hmask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8, Blocks, Format, register
from .bits import pack, scaled, unpack
from .search import (
    aligned,
    block_error_weights,
    first_extreme,
    nearest_int,
    ordered_sum,
    requantize,
    search_scale,
    search_scale_by_descent,
)

QK_K = 256
block_q3_K = np.dtype(
    [("hmask", "u1", QK_K // 8), ("qs", "u1", QK_K // 4), ("scales", "u1", 12), ("d", "<f2")]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; qs as in Q2_K, bit i of byte j of hmask belongs to weight 32 *
    i + j.
    """
    low = unpack(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, QK_K)
    high = unpack(blocks["hmask"], 1).reshape(-1, QK_K)
    q = (low | high << 2).astype(np.int8) - np.int8(4)
    return scaled(blocks["d"].astype(np.float32)[:, None] * unpack_scales(blocks["scales"]), q)


def unpack_scales(scales: U8) -> NDArray[np.int8]:
    """scales[n, 12] -> [n, 16] in -32..31: four low bits in the first 8 bytes, two high bits in the
    last 4.
    """
    low = unpack(scales[:, :8], 4).reshape(-1, 16)
    high = unpack(scales[:, 8:], 2).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def pack_scales(levels: U8) -> U8:
    """levels[n, 16] in 0..63 -> [n, 12], the inverse of `unpack_scales`, which subtracts 32."""
    low = pack((levels & np.uint8(15)).reshape(-1, 2, 8), 4)
    high = pack((levels >> np.uint8(4)).reshape(-1, 4, 4), 2)
    return np.concatenate([low, high], axis=1)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n] (ggml quantize_row_q3_K_ref)."""
    scales, found = search_scale_by_descent(aligned(weights.reshape(-1, 16).T), 4)
    scales = scales.reshape(-1, 16)
    extreme = first_extreme(scales.T)[:, None]
    inverse = np.float32(-32) / extreme
    levels = np.clip(nearest_int(inverse * scales), np.float32(-32), np.float32(31))
    levels = np.where(extreme != 0, levels, np.float32(-32))
    d = np.where(extreme != 0, np.float32(1) / inverse, np.float32(0))
    return _blocks(weights, d[:, 0], levels, found)


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_row_q3_K_impl)."""
    errors = block_error_weights(weights, importance)
    errors = aligned(errors.reshape(-1, 16).T)
    scales, found = search_scale(aligned(weights.reshape(-1, 16).T), errors, 4)
    totals = aligned(ordered_sum(errors).reshape(-1, 16).T)
    d, levels = search_scale(aligned(scales.reshape(-1, 16).T), totals, 32)
    return _blocks(weights, d, levels.T, found)


def _blocks(weights: F32, d: F32, levels: F32, found: F32) -> Blocks:
    """Blocks of weights[n, 256] with d[n] and levels[n, 16] in -32..31; found[16, 16 n] as in
    `requantize`.
    """
    blocks = np.empty(len(weights), block_q3_K)
    blocks["d"] = d
    blocks["scales"] = pack_scales((levels + np.float32(32)).astype(np.uint8))
    group_scales = blocks["d"].astype(np.float32)[:, None] * levels
    q = (requantize(weights, group_scales, 0.0, found, -4, 3) + np.int8(4)).view(np.uint8)
    blocks["qs"] = pack((q & np.uint8(3)).reshape(-1, 2, 4, 32), 2).reshape(-1, QK_K // 4)
    blocks["hmask"] = pack((q >> np.uint8(2)).reshape(-1, 8, 32), 1)
    return blocks


Q3_K = register(
    Format(
        *("Q3_K", 11, QK_K, block_q3_K, dequantize, quantize, quantize_weighted),
        searches=True,
        tile=(3, 16, "SUB"),
    )
)
