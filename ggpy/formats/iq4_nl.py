"""IQ4_NL: 32 codes of a fixed, uneven 16-value table and one scale; w = d * table[q]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8, Blocks, Format, register
from .bits import inverse_or_zero, pack, scaled, unpack
from .search import (
    ALL_ZERO,
    aligned,
    block_error_weights,
    finite_inverse,
    first_extreme,
    ordered_sum,
)

QK4_NL = 32
block_iq4_nl = np.dtype([("d", "<f2"), ("qs", "u1", QK4_NL // 2)])

# ggml's kvalues_iq4nl; shared with IQ4_XS.
VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)

# The nearest code and value for every half from -128 to 127.5.
CODES_BY_HALVES = np.searchsorted(
    VALUES[:-1].astype(np.int32) + VALUES[1:], np.arange(-256, 256), side="right"
).astype(np.uint8)
VALUES_BY_HALVES = VALUES[CODES_BY_HALVES].astype(np.float32)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; byte j has weights j and j + 16."""
    return scaled(blocks["d"].astype(np.float32)[:, None], VALUES[unpack(blocks["qs"], 4)])


def nearest_codes(x: F32) -> U8:
    """The codes of the table values nearest to x; ties go to the higher value."""
    codes: U8 = np.take(CODES_BY_HALVES, _halves(x))
    return codes


def nearest_values(x: F32) -> F32:
    """The table values nearest to x."""
    values: F32 = np.take(VALUES_BY_HALVES, _halves(x))
    return values


def _halves(x: F32) -> NDArray[np.intp]:
    """The position of x among the halves from -128 to 127.5: middles between values are halves."""
    halves = np.floor(x + x)
    np.clip(halves, np.float32(-256), np.float32(255), out=halves)
    positions: NDArray[np.intp] = halves.astype(np.intp) + np.intp(256)
    return positions


def search_table_scale(x: F32, weights: F32) -> F32:
    """x[32, g], weights[32, g] -> scales[g] with the least error of scale * (the nearest table
    value).

    Tries 15 scales about the one that makes the extreme weight -127; shared with IQ4_XS (ggml
    quantize_row_iq4_nl_impl).
    """
    extreme = first_extreme(x)
    weighted = np.zeros_like(x)
    scale = best = np.zeros_like(extreme)
    first_inverse = finite_inverse(1, -extreme / np.float32(VALUES[0]))
    inverses = [finite_inverse(int(VALUES[0]) + i, extreme) for i in range(-7, 8)]
    for i, inverse in enumerate([first_inverse, *inverses]):
        q = nearest_values(x * inverse)
        np.multiply(weights, q, out=weighted)
        sum_qx, sum_q2 = ordered_sum(weighted * x), ordered_sum(weighted * q)
        better = (sum_q2 > 0) & ((i == 0) | (sum_qx * sum_qx > best * sum_q2))
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
    return np.where(np.abs(extreme) < ALL_ZERO, np.float32(0), scale)


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]; an error counts by the weight squared (ggml quantize_iq4_nl)."""
    return _blocks(weights, weights * weights)


def quantize_weighted(weights: F32, importance: F32) -> Blocks:
    """weights[n, 32], importance[m, 32] -> blocks[n] (ggml quantize_iq4_nl)."""
    return _blocks(weights, block_error_weights(weights, importance))


def _blocks(weights: F32, errors: F32) -> Blocks:
    scales = search_table_scale(aligned(weights.T), aligned(errors.T))
    codes = nearest_codes(weights * inverse_or_zero(scales)[:, None])
    blocks = np.empty(len(weights), block_iq4_nl)
    blocks["d"], blocks["qs"] = scales, pack(codes.reshape(-1, 2, QK4_NL // 2), 4)
    return blocks


IQ4_NL = register(
    Format(
        *("IQ4_NL", 20, QK4_NL, block_iq4_nl, dequantize, quantize, quantize_weighted),
        searches=True,
        tile=(4, 32, "D"),
        tile_values=tuple(VALUES.tolist()),
    )
)
