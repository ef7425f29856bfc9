"""The layout of packed activations (cuda/layout/packed.cuh) in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggpy.kernels.layout.pack import CODES, STEP, steps_of


def column_indices(order: int) -> list[int]:
    """The index of each of the 64 columns of a step in its packed row, before the swizzle."""
    resident_splits = []
    for column in range(STEP):
        c, e = column % 32, column % 4
        s, t = (c // 4 % 2, c // 8) if order == CODES else (c // 16, c // 4 % 4)
        resident_splits.append(column // 32 * 32 + 16 * s + 8 * (e // 2) + 2 * t + e % 2)
    return resident_splits


def unpacked(packed: NDArray, n_tokens: int, columns: int, order: int) -> NDArray:
    """Unpacks f16 activations to rows, padded to multiples of 8 tokens and 128 columns."""
    steps, tokens = steps_of(columns), -(-n_tokens // 8) * 8
    pieces = packed.reshape(steps, tokens, 8, 8)
    straight = np.empty_like(pieces)
    for token in range(tokens):
        for piece in range(8):
            straight[:, token, piece] = pieces[:, token, piece ^ token % 8]
    elements = straight.reshape(steps, tokens, STEP)
    return elements[:, :, column_indices(order)].transpose(1, 0, 2).reshape(tokens, steps * STEP)
