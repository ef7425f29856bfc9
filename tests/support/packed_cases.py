"""The packed order of activations (cuda/layout/packed.cuh) once more, in numpy, written out slowly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggpy.kernels.layout.pack import CODES, STEP, steps_of


def column_places(order: int) -> list[int]:
    """Where each of the 64 columns of a step stands among its halves, before the swizzle."""
    places = []
    for column in range(STEP):
        c, e = column % 32, column % 4
        s, t = (c // 4 % 2, c // 8) if order == CODES else (c // 16, c // 4 % 4)
        places.append(column // 32 * 32 + 16 * s + 8 * (e // 2) + 2 * t + e % 2)
    return places


def unpacked(packed: NDArray, n_tokens: int, columns: int, order: int) -> NDArray:
    """Rows [tokens up to a multiple of 8, columns up to a multiple of 128] of packed halves."""
    steps, tokens = steps_of(columns), -(-n_tokens // 8) * 8
    pieces = packed.reshape(steps, tokens, 8, 8)
    straight = np.empty_like(pieces)
    for token in range(tokens):
        for piece in range(8):
            straight[:, token, piece] = pieces[:, token, piece ^ token % 8]
    halves = straight.reshape(steps, tokens, STEP)
    return halves[:, :, column_places(order)].transpose(1, 0, 2).reshape(tokens, steps * STEP)
