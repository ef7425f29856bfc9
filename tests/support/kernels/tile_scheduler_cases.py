"""The tile scheduler of cuda/gemm/tile_scheduler.cuh in Python: the work tiles of each CTA."""

from __future__ import annotations

import numpy as np

from ggpy.kernels.gemm.hopper import TileSchedulerArgs


def divided(x: np.ndarray, inverse: int) -> np.ndarray:
    """divided() of cuda/gemm/tile_scheduler.cuh: the upper 32 bits of a 64-bit product."""
    return (
        x
        if inverse == 0
        else (x.astype(np.uint64) * np.uint64(inverse) >> np.uint64(32)).astype(x.dtype)
    )


def work_tiles(d: TileSchedulerArgs, ctas: int) -> list[list[tuple[int, int, int]]]:
    """For each CTA: its work tiles (tile, first stage, end stage)."""
    found = []
    numbers = np.arange(ctas + 1)
    team, member = np.divmod(numbers, d.team) if d.team else (0, numbers)
    assert d.team == 0 or np.array_equal(divided(numbers, d.inverse_team), team)
    begin = team * d.stages + member * d.stages_per_cta + np.minimum(member, d.remainder)
    for b in range(ctas):
        own = [(b + r * ctas, 0, d.stages) for r in range(d.waves)]
        own = [work for work in own if work[0] < d.n_tiles]
        at = int(begin[b])
        while at < begin[b + 1]:
            tiling = int(divided(np.array([at]), d.inverse_stages)[0])
            first = at - tiling * d.stages
            last = min(d.stages, first + begin[b + 1] - at)
            own.append((d.waves * ctas + tiling, first, last))
            at += last - first
        found.append(own)
    return found
