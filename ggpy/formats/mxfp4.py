"""MXFP4: 32 numbers of the 4-bit float E2M1 and a power of two as scale (OCP Microscaling Formats,
version 1.0).

As ggml does, the E2M1 values are kept doubled, as integers, and the scale halved.
"""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks, Format, ScaleCodec, register
from .bits import largest_magnitude, pack, scaled, unpack

QK_MXFP4 = 32
block_mxfp4 = np.dtype([("e", "u1"), ("qs", "u1", QK_MXFP4 // 2)])

# Twice the value of each E2M1 code; the fourth bit is the sign.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)

# Half way between neighbouring magnitudes.
E2M1_MIDDLES = (E2M1_DOUBLED[:7] + E2M1_DOUBLED[1:8]).astype(np.float32) / np.float32(2)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 32]; byte j has weights j and j + 16."""
    return scaled(half_scale(blocks["e"])[:, None], E2M1_DOUBLED[unpack(blocks["qs"], 4)])


def half_scale(e: U8) -> F32:
    """2^(e - 128): half of what E8M0 code e stands for; 255, its NaN, is read as ggml reads it."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def read_scales(blocks: Blocks) -> F32:
    """blocks[n] -> scales[n, 1] of the doubled values; code 255 is NaN."""
    return np.where(blocks["e"] == 255, np.float32(np.nan), half_scale(blocks["e"]))[:, None]


def write_scales(blocks: Blocks, scales: F32) -> None:
    """The nearest power of two, by exponent."""
    magnitude = np.maximum(np.abs(scales[:, 0]), np.finfo(np.float32).tiny)
    blocks["e"] = np.clip(np.rint(np.log2(magnitude)) + 128, 0, 254)


def quantize(weights: F32) -> Blocks:
    """weights[n, 32] -> blocks[n]: the largest magnitude's exponent, less 2, is the scale's.

    As ggml quantize_row_mxfp4_ref does, the exponent is that of a logarithm rounded to f32.
    """
    blocks = np.empty(len(weights), block_mxfp4)
    amax = largest_magnitude(weights)
    exponent = np.floor(np.log2(amax.astype(np.float64)).astype(np.float32))
    # Below 2^-125 the code wraps, as ggml's does, and all weights become 0. But 255 would be NaN.
    e = np.minimum(np.where(amax > 0, exponent + 125, 0).astype(np.int32) & 255, 254)
    blocks["e"] = e
    codes = nearest_e2m1(weights, half_scale(e)[:, None])
    blocks["qs"] = pack(codes.reshape(-1, 2, QK_MXFP4 // 2), 4)
    return blocks


def nearest_e2m1(weights: F32, scales: F32) -> U8:
    """weights[n, b], scales[n, 1] of the doubled values -> codes[n, b]; ties go to the smaller
    magnitude.

    A middle times a scale is exact, so comparing with it is the same as comparing distances.
    """
    magnitudes = np.abs(weights)
    codes = np.zeros(weights.shape, np.uint8)
    for middle in E2M1_MIDDLES:
        codes += magnitudes > middle * scales
    codes[scales[:, 0] == 0] = 0
    return np.where((weights < 0) & (codes > 0), codes | np.uint8(8), codes)


MXFP4 = register(
    Format(
        "MXFP4",
        39,
        QK_MXFP4,
        block_mxfp4,
        dequantize,
        quantize,
        scale_codec=ScaleCodec(read_scales, write_scales),
        tile=(4, 32, "E8"),
        tile_values="E2M1",
    )
)
