"""Fields narrower than a byte, and the arithmetic that every block format shares.

Knows how ggml packs fields (the lowest bits first, neighbours in a byte a stride apart), but no
format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8

SIGN_BIT = np.uint32(1 << 31)
JUST_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


def unpack(packed: U8, bits: int) -> U8:
    """packed[..., k] -> fields[..., 8 // bits, k]: byte k's fields of 1, 2 or 4 bits, the lowest
    first.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def pack(fields: U8, bits: int) -> U8:
    """fields[..., 8 // bits, k] -> packed[..., k], the inverse of `unpack`; a field's higher bits
    must be 0.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: U8 = np.bitwise_or.reduce(fields << shifts, axis=-2)
    return packed


def unpack_in_place(packed: U8, bits: int) -> U8:
    """packed[n, k] -> fields[n, k * 8 // bits]: the fields of one byte are neighbours, the lowest
    first.
    """
    return unpack(packed, bits).swapaxes(-1, -2).reshape(len(packed), -1)


def scaled(scales: F32, quants: NDArray[Any]) -> F32:
    """scales[n, k] * quants[n, b] -> weights[n, b], each scale for b / k neighbours."""
    weights = quants.astype(np.float32).reshape(*scales.shape, -1)
    weights *= scales[:, :, None]
    return weights.reshape(len(scales), -1)


def scaled_and_shifted(scales: F32, quants: NDArray[Any], minimums: F32) -> F32:
    """scales[n, k] * quants[n, b] + minimums[n, k] -> weights[n, b]."""
    weights = scaled(scales, quants).reshape(*scales.shape, -1)
    weights += minimums[:, :, None]
    return weights.reshape(len(scales), -1)


def inverse_or_zero(x: F32) -> F32:
    """1 / x, and 0 where x is 0; infinite where x is so small that 1 / x overflows."""
    return np.where(x == 0, np.float32(0), np.float32(1) / x)


def largest_magnitude(weights: F32) -> F32:
    """weights[n, b] -> max |w|, [n]; b is a power of two.

    Neighbours are compared until one is left: numpy's maximum over short rows takes three times as
    long.
    """
    largest = np.abs(weights).reshape(-1)
    while len(largest) > len(weights):
        largest = np.maximum(largest[0::2], largest[1::2])
    return largest


def finite_or_zero(x: F32) -> F32:
    """x, and 0 where it is infinite, as C code converts an infinite product to an integer."""
    return np.where(np.isinf(x), np.float32(0), x)


def round_half_away(x: F32) -> NDArray[np.int8]:
    """C's roundf, for x in the range of int8.

    The conversion to int8 drops the fraction of x plus, with the sign of x, the number just below
    0.5; 0.5 itself would send that number to 1. (np.copysign takes twice as long.)
    """
    nearly_half = x.view(np.uint32) & SIGN_BIT | JUST_BELOW_HALF.view(np.uint32)
    rounded: NDArray[np.int8] = (x + nearly_half.view(np.float32)).astype(np.int8)
    return rounded
