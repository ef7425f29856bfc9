"""Who makes which stages of which tiles of a product on Hopper, as struct Shares of cuda/gemm/tile_scheduler.cuh
has it.
"""

from __future__ import annotations

import numpy as np

from ggpy.kernels.gemm.hopper import Dealt


def divided(x: np.ndarray, by: int) -> np.ndarray:
    """As cuda/gemm/tile_scheduler.cuh: the high half of a product of 32 bits."""
    return x if by == 0 else (x.astype(np.uint64) * np.uint64(by) >> np.uint64(32)).astype(x.dtype)


def shares(d: Dealt, blocks: int) -> list[list[tuple[int, int, int]]]:
    """(tile, first stage, last) of each block."""
    found = []
    begin = [b * d.each + min(b, d.more) for b in range(blocks + 1)]
    for b in range(blocks):
        mine = [(b + r * blocks, 0, d.stages) for r in range(d.rounds)]
        mine = [share for share in mine if share[0] < d.n_tiles]
        at = begin[b]
        while at < begin[b + 1]:
            cut = int(divided(np.array([at]), d.by_stages)[0])
            first = at - cut * d.stages
            last = min(d.stages, first + begin[b + 1] - at)
            mine.append((d.rounds * blocks + cut, first, last))
            at += last - first
        found.append(mine)
    return found
