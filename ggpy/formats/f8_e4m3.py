"""F8_E4M3: 8-bit floats with 4 bits of exponent and 3 of mantissa, no infinities, and one NaN of
each sign (E4M3 of Micikevicius et al. 2022, FP8 Formats).

ggml has no such type: in a file these are bytes of type I8, and the file's metadata says what they
are. They come with a scale for each row, because their range is small.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .base import F32, PRIVATE_ID, U8, Blocks, Format, ScaleCodec, register

LARGEST = 448.0
NAN = 0x7F
SMALLEST = np.float32(2.0**-6)  # the smallest normal number
SPACING = np.float32(2.0**-9)  # of subnormal numbers


@cache
def values() -> F32:
    """The numbers of all 256 codes."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    fraction = mantissa / 8 + (exponent > 0)
    magnitude = fraction * 2.0 ** (np.maximum(exponent, 1) - 7)
    magnitude[codes & 127 == NAN] = np.nan
    found: F32 = np.where(codes & 128, -magnitude, magnitude).astype(np.float32)
    found.setflags(write=False)
    return found


def dequantize(codes: Blocks) -> F32:
    """codes[n] -> weights[n, 1]."""
    return values()[codes][:, None]


def quantize(weights: F32) -> Blocks:
    """weights[n, 1] -> codes[n]."""
    return encode(weights[:, 0])


def encode(numbers: F32) -> U8:
    """numbers of any shape -> the nearest codes, ties to even; magnitudes beyond 448 become 448,
    and NaN stays NaN.
    """
    magnitude = np.minimum(np.abs(numbers), np.float32(LARGEST))
    bits = magnitude.view(np.uint32)
    # The upper three bits of a float32's mantissa stay; the bias of its exponent is larger by 120.
    rounded = ((bits + (0x7FFFF + (bits >> 20 & 1))) >> 20) - (120 << 3)
    codes = np.where(magnitude < SMALLEST, np.rint(magnitude / SPACING), rounded).astype(np.uint8)
    codes[np.isnan(magnitude)] = NAN
    found: U8 = codes | np.signbit(numbers).astype(np.uint8) << np.uint8(7)
    return found


def write(codes: Blocks, scales: F32) -> None:
    """A number is its own scale. Infinity becomes NaN, so that a check of scales finds it."""
    numbers = scales[:, 0]
    codes[:] = encode(np.where(np.isinf(numbers), np.float32(np.nan), numbers))


F8_E4M3 = register(
    Format(
        *("F8_E4M3", PRIVATE_ID, 1, np.dtype("u1"), dequantize, quantize),
        scale_codec=ScaleCodec(dequantize, write),
        tile=(8, 32, "NONE"),
        tile_values="E4M3",
    )
)
