"""The twelve bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minimums.

Bytes 0-3 have scales 0-3, bytes 4-7 minimums 0-3, each in the low six bits. Bytes 8-11 have the low
nibbles of scales 4-7 and, above them, of minimums 4-7, whose high two bits are the spare ones of
bytes 0-3 and 4-7.
"""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks
from .bits import pack, unpack
from .search import (
    aligned,
    block_error_weights,
    mean_square,
    nearest_int,
    ordered_sum,
    requantize,
    search_positive_scale,
    search_scale_and_minimum,
)


def unpack_scales(packed: U8) -> U8:
    """packed[n, 12] -> [n, 2, 8]: scales, then minimums, in 0..63."""
    first = packed[:, :8].reshape(-1, 2, 4)
    second = unpack(packed[:, 8:], 4) | first >> 6 << 4
    return np.concatenate([first & 63, second], axis=2)


def scales_and_minimums(blocks: Blocks) -> tuple[F32, F32]:
    """blocks[n] -> the scale and the minimum of each 32 weights, [n, 8] each: d * scale and -dmin *
    minimum.
    """
    packed = unpack_scales(blocks["scales"])
    d, dmin = (blocks[field].astype(np.float32)[:, None] for field in ("d", "dmin"))
    return d * packed[:, 0], -(dmin * packed[:, 1])


def pack_scales(scales: U8) -> U8:
    """[n, 2, 8] in 0..63: scales, then minimums -> packed[n, 12]."""
    first, second = scales[:, :, :4], scales[:, :, 4:]
    spare = (second >> np.uint8(4)) << np.uint8(6)
    return np.concatenate([(first | spare).reshape(-1, 8), pack(second & np.uint8(15), 4)], axis=1)


def quantize(blocks: Blocks, weights: F32, n_max: int, steps: tuple[float, float, int]) -> U8:
    """Fills d, dmin and scales of blocks[n] for weights[n, 256] and returns q[n, 256] in 0..n_max.

    As in ggml quantize_row_q4_K_ref: an error counts by the magnitude of its weight and the group's
    mean.
    """
    groups = weights.reshape(-1, 32)
    magnitude = np.sqrt(mean_square(groups))
    x = aligned(groups.T)
    errors = aligned(magnitude + np.abs(x))
    search = search_scale_and_minimum(x, errors, n_max, steps, "squared")
    found = np.stack([search[0], -search[1]]).reshape(2, -1, 8)  # scales, minimums; [n, 8] each
    largest = np.maximum(found.max(axis=2), np.float32(0))
    inverse = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    levels = nearest_int(inverse[:, :, None] * found).astype(np.int32).astype(np.uint8)
    _store(blocks, largest / np.float32(63), np.minimum(levels, 63))
    return requantize(weights, *scales_and_minimums(blocks), search[2], 0, n_max).view(np.uint8)


def quantize_weighted(blocks: Blocks, weights: F32, importance: F32, n_max: int) -> U8:
    """`quantize` with the importance[m, 256] of the columns (ggml quantize_row_q4_K_impl)."""
    errors = block_error_weights(weights, importance)
    x, errors = aligned(weights.reshape(-1, 32).T), aligned(errors.reshape(-1, 32).T)
    search = search_scale_and_minimum(x, errors, n_max, (-0.9, 0.05, 36), "weighted")
    totals = aligned(ordered_sum(errors).reshape(-1, 8).T)
    both = [
        search_positive_scale(aligned(found.reshape(-1, 8).T), totals, 63)
        for found in (search[0], -search[1])
    ]
    levels = np.stack([both[0][1].T, both[1][1].T]).astype(np.uint8)
    if n_max == 31:  # Q4_K lets a negative scale, which is rare, spill into other bits
        levels = np.minimum(levels, 63)
    _store(blocks, np.stack([both[0][0], both[1][0]]), levels)
    return requantize(weights, *scales_and_minimums(blocks), search[2], 0, n_max).view(np.uint8)


def _store(blocks: Blocks, d_and_dmin: F32, levels: U8) -> None:
    """Stores d_and_dmin[2, n] and levels[2, n, 8] of scales and minimums."""
    blocks["d"], blocks["dmin"] = d_and_dmin
    blocks["scales"] = pack_scales(levels.swapaxes(0, 1))
