"""How many splits the contexts of a decode step have, and how many splits are launched.

The number of launched splits is a part of a step's shape. It changes as rarely as possible while
contexts grow, because each shape has a CUDA graph of its own. CTAs without a split end at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....kernels.attention.paged_attention import POSITIONS_PER_SPLIT, plan_tiles
from .padding import power_of_two

MOST_FOR_MANY = 8  # of more tokens: those that could run at once are launched, up to this many

Ints = NDArray[np.int32]


def plan_decode_tiles(
    positions: Ints, sequences: Ints, kernels: Any, max_split_tokens: int
) -> tuple[Ints, int]:
    """The attention tiles[T, 4] of a decode step, and the number of splits to launch."""
    attention, n = kernels.decode, len(positions)
    resident = attention.resident_splits(n)
    sizes = {"resident_splits": resident, "max_split_tokens": max_split_tokens}
    tiles = plan_tiles(positions, sequences, kernels.heads, **sizes)
    least = attention.launched_splits(n, 1)
    if resident is not None:
        even = max(1, resident // n)  # splits of contexts of one length: these run at once
        least = max(least, min(power_of_two(even + 1) // 2, MOST_FOR_MANY))
        _cut_to(tiles, positions // POSITIONS_PER_SPLIT, resident, least)
    return tiles, max(least, attention.launched_splits(n, int(tiles[:, 2].max())))


def _cut_to(tiles: Ints, full: Ints, resident: int, least: int) -> None:
    """Limit contexts to `least` splits where only rounding gave them more.

    plan_tiles divides `resident` splits in proportion to context lengths, counted in units of
    POSITIONS_PER_SPLIT and rounded up. full[T]: whole units of a context. A context that begins a
    unit before others of nearly its length would get more splits than they do.
    """
    share = full * resident // max(1, int(full.sum()) + len(full) - 1)
    if (share <= least).all():
        np.minimum(tiles[:, 2], least, out=tiles[:, 2])
        tiles[tiles[:, 2] == 1, 3] = -1
