"""Matrices with one scale for each row: w[n, k] = value[n, k] * scale[n], values in some format.

Weights with a scale for each output channel are stored like this, and activations are quantised
like this, with a scale for each token. A row is scaled to the range of the values: int8 has
-127..127, F8_E4M3 -448..448, and Q4_0 -8..7, in blocks whose own scale is 1. Knows no tensor's
name.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .base import F32, U8, Format, by_name
from .bits import pack
from .f8_e4m3 import LARGEST, encode
from .q4_0 import QK4_0, block_q4_0

INT8_LARGEST = 127.0


def by_row(name: str) -> Format:
    """The format of this name, if its values can have a scale for each row; ValueError."""
    format = by_name(name)
    if format.name not in _SCALES:
        raise ValueError(f"{format.name} has no scales for rows: {', '.join(_SCALES)} have")
    return format


def stored_as(format: Format) -> Format:
    """The type of a format in a file: I8 if ggml has no such type."""
    return by_name("I8") if format.is_private else format


def row_scales(weights: F32, format: Format) -> F32:
    """scale[n] of weights[n, K]; 0 for a row of zeros."""
    return _SCALES[format.name](weights)


def encode_rows(weights: F32, scales: F32, format: Format) -> U8:
    """The values of weights[n, K] / scales[n], nearest with ties to even, bytes[n, row_bytes]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = weights / scales[:, None]
    values[scales == 0] = 0
    return _ENCODERS[format.name](values)


def largest_scales(largest: float) -> Callable[[F32], F32]:
    """A function weights[n, K] -> scale[n], so that a row's largest magnitude becomes `largest`."""

    def scales(weights: F32) -> F32:
        found: F32 = np.abs(weights).max(axis=1, initial=0) / np.float32(largest)
        return found

    return scales


def _q4_0_scales(weights: F32) -> F32:
    """The weight of the largest magnitude becomes -8, whatever its sign: 16 codes are used."""
    place = np.abs(weights).argmax(axis=1)[:, None]
    found: F32 = np.take_along_axis(weights, place, axis=1)[:, 0] / np.float32(-8)
    return found + np.float32(0)  # no negative zero


def to_int8(values: F32) -> U8:
    """values, rounded and clipped to -127..127, as bytes."""
    return np.clip(np.rint(values), -INT8_LARGEST, INT8_LARGEST).astype(np.int8).view(np.uint8)


def _to_q4_0(values: F32) -> U8:
    codes = (np.clip(np.rint(values), -8, 7) + 8).astype(np.uint8)
    return blocks_of_codes(codes)


def blocks_of_codes(codes: U8) -> U8:
    """codes[n, K] in 0..15 -> rows of Q4_0 whose scales are 1, bytes[n, row_bytes]."""
    blocks = np.empty((len(codes), codes.shape[1] // QK4_0), block_q4_0)
    blocks["d"] = 1
    blocks["qs"] = pack(codes.reshape(*blocks.shape, 2, QK4_0 // 2), 4)
    return blocks.view(np.uint8).reshape(len(codes), -1)


_SCALES: dict[str, Callable[[F32], F32]] = {
    "I8": largest_scales(INT8_LARGEST),
    "F8_E4M3": largest_scales(LARGEST),
    "Q4_0": _q4_0_scales,
}
_ENCODERS: dict[str, Callable[[F32], U8]] = {"I8": to_int8, "F8_E4M3": encode, "Q4_0": _to_q4_0}
