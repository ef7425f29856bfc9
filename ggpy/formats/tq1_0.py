"""TQ1_0: 256 ternary digits and one scale, five digits in a byte; w = d * (digit - 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8, Blocks, Format, register
from .bits import scaled
from .tq2_0 import quantize_ternary

QK_K = 256
block_tq1_0 = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])

POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


def dequantize(blocks: Blocks) -> F32:
    """blocks[n] -> weights[n, 256].

    32 bytes with digits 32 apart, 16 bytes with digits 16 apart, and the 4 bytes of qh with four
    digits 4 apart.
    """
    qs, qh = blocks["qs"], blocks["qh"]
    parts = [digits(qs[:, :32], 5), digits(qs[:, 32:], 5), digits(qh, 4)]
    return scaled(blocks["d"].astype(np.float32)[:, None], np.concatenate(parts, axis=1))


def digits(packed: U8, count: int) -> NDArray[np.int8]:
    """packed[n, k] -> the first `count` digits of each byte, less 1: [n, count * k].

    A byte / 256 is a fraction in base 3. Multiplying by 3^i modulo 256 makes digit i the first one,
    which is the whole part of 3 times the fraction.
    """
    shifted = packed[:, None, :] * POWERS_OF_3[:count, None]
    leading = (shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return (leading.astype(np.int8) - np.int8(1)).reshape(len(packed), -1)


def quantize(weights: F32) -> Blocks:
    """weights[n, 256] -> blocks[n]: d is the largest magnitude (ggml quantize_row_tq1_0_ref)."""
    blocks = np.empty(len(weights), block_tq1_0)
    blocks["d"], q = quantize_ternary(weights)
    first, second, last = np.split(q, [160, 240], axis=1)
    qs = [pack_digits(first.reshape(-1, 5, 32)), pack_digits(second.reshape(-1, 5, 16))]
    blocks["qs"] = np.concatenate(qs, axis=1)
    blocks["qh"] = pack_digits(last.reshape(-1, 4, 4))
    return blocks


def pack_digits(q: U8) -> U8:
    """q[n, 4 or 5, k] in 0..2 -> packed[n, k]: the inverse of `digits`; 256/243 of the base-3
    number, rounded up.
    """
    places = POWERS_OF_3[::-1][: q.shape[1], None].astype(np.uint16)
    numbers = (q * places).sum(axis=1, dtype=np.uint16)
    packed: U8 = ((numbers * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)
    return packed


# Tiles have 2.5 bits for each weight: whole digits, and a scale for each 32.
TQ1_0 = register(Format("TQ1_0", 34, QK_K, block_tq1_0, dequantize, quantize, tile=(2, 32, "D")))
