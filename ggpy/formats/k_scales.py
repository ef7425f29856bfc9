"""The twelve bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minimums.

Bytes 0-3 have scales 0-3, bytes 4-7 minimums 0-3, each in the low six bits. Bytes 8-11 have the low
nibbles of scales 4-7 and, above them, of minimums 4-7, whose high two bits are the spare ones of
bytes 0-3 and 4-7.
"""

from __future__ import annotations

import numpy as np

from .base import F32, U8, Blocks
from .bits import unpack


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
