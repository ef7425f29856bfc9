"""The codebooks of the IQ types: points of 4 or 8 magnitudes, and the signs that go with eight
weights.

The points are those of the `gguf` package, which is imported when the first one is needed. Knows no
block layout.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import F32, U8

# The numbers of IQ2's points with either sign.
IQ2_VALUES = (-43, -25, -8, 8, 25, 43)


@cache
def grid(name: str) -> NDArray[np.int8]:
    """The points of the format `name`: [256 ... 2048, 8], for IQ3 types [256 or 512, 4]."""
    from gguf import quants

    codebook = getattr(quants, name)
    codebook.init_grid()
    points: NDArray[np.int8] = codebook.grid.reshape(codebook.grid_shape).astype(np.int8)
    points.setflags(write=False)
    return points


@cache
def _float_grid(name: str) -> F32:
    return grid(name).astype(np.float32)


@cache
def _sign_table() -> F32:
    """Byte -> the signs of eight weights, [256, 8]: a set bit is -1, the lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def points(name: str, indices: NDArray[Any]) -> F32:
    """indices[n, k] into a grid -> its points in a row, [n, k * (4 or 8)]."""
    values: F32 = _float_grid(name)[indices].reshape(len(indices), -1)
    return values


def signed_points(name: str, indices: NDArray[Any], signs: U8) -> F32:
    """indices[n, k], signs[n, m], a bit for each weight -> points with these signs, [n, m * 8]."""
    values = points(name, indices).reshape(*signs.shape, 8)
    values *= _sign_table()[signs]
    return values.reshape(len(indices), -1)


def even_signs(codes: NDArray[Any]) -> U8:
    """7-bit codes -> sign bytes: the eighth sign makes the number of minus signs even (ggml's
    ksigns_iq2xs).
    """
    low = codes.astype(np.uint8)
    parity = low ^ low >> np.uint8(4)
    parity ^= parity >> np.uint8(2)
    parity ^= parity >> np.uint8(1)
    return low | (parity & np.uint8(1)) << np.uint8(7)
