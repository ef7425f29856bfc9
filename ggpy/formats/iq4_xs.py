"""IQ4_XS: 256 codes of IQ4_NL's table; each 32 a 6-bit scale; w = d * (scale - 32) * table[q]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, Blocks, Format, register
from .bits import inverse_or_zero, pack, scaled, unpack, unpack_in_place
from .iq4_nl import VALUES, nearest_codes, search_table_scale
from .search import aligned, block_error_weights, first_extreme, nearest_int

QK_K = 256
block_iq4_xs = np.dtype(
    [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", QK_K // 64), ("qs", "u1", QK_K // 2)]
)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256]; byte 16 * g + j has weights 32 * g + j + (0, 16)."""
    d = blocks["d"].astype(np.float32)[:, None] * unpack_scales(blocks)
    return scaled(d, VALUES[unpack(blocks["qs"].reshape(-1, 8, 16), 4)])


def unpack_scales(blocks: Blocks) -> NDArray[np.int8]:
    """blocks[n] -> [n, 8] in -32..31: nibbles of scales_l, two bits more in scales_h."""
    low = unpack_in_place(blocks["scales_l"], 4)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    return (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]; errors count by the square (ggml quantize_iq4_xs)."""
    return _blocks(weights, weights * weights)


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 256], importance[m, 256] -> blocks[n] (ggml quantize_iq4_xs)."""
    return _blocks(weights, block_error_weights(weights, importance))


def _blocks(weights: F32, errors: F32) -> Blocks:
    groups = weights.reshape(-1, 32)
    found = search_table_scale(aligned(groups.T), aligned(errors.reshape(-1, 32).T)).reshape(-1, 8)
    d = -first_extreme(found.T) / np.float32(32)
    levels = np.clip(
        nearest_int(inverse_or_zero(d)[:, None] * found), np.float32(-32), np.float32(31)
    )
    inverse = inverse_or_zero(d[:, None] * levels)
    codes = nearest_codes(groups * inverse.reshape(-1, 1))
    blocks = np.empty(len(weights), block_iq4_xs)
    blocks["d"], blocks["qs"] = d, pack(codes.reshape(-1, 8, 2, 16), 4).reshape(-1, QK_K // 2)
    scales = (levels + np.float32(32)).astype(np.uint16)
    blocks["scales_l"] = pack(
        scales.astype(np.uint8).reshape(-1, 4, 2).swapaxes(1, 2) & np.uint8(15), 4
    )
    high = scales >> np.uint16(4) << np.arange(0, 16, 2, dtype=np.uint16)
    blocks["scales_h"] = np.bitwise_or.reduce(high, axis=1)
    return blocks


IQ4_XS = register(
    Format(
        *("IQ4_XS", 23, QK_K, block_iq4_xs, dequantize, quantize, quantize_weighted),
        searches=True,
        tile=(4, 32, "SUB"),
        tile_values=tuple(VALUES.tolist()),
    )
)
