"""Kernel parameters of tile schedules on Hopper, for numbers of CTAs that do not divide the
work.
"""

from __future__ import annotations

import numpy as np
import pytest
from tile_scheduler_cases import divided, work_tiles

from ggpy.kernels.gemm.hopper import inverse, tile_scheduler_args
from ggpy.kernels.gemm.tile_scheduler import Tiling

N_SMS = 132


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 32, 56, 57, 111, 112, 208, 416, 1000])
def test_an_inverse_divides(divisor: int) -> None:
    """All numbers that a GEMM of a model may have: x * divisor < 2^32."""
    most = min(1 << 22, (1 << 32) // divisor)
    x = np.concatenate([np.arange(1 << 16), np.arange(most - (1 << 16), most)])
    assert 0 <= inverse(divisor) < 1 << 32
    assert np.array_equal(divided(x, inverse(divisor)), x // divisor)


TILINGS = [
    Tiling(8, True),
    Tiling(64, True),
    Tiling(128, False),
    Tiling(256, True),
    Tiling(256, True, split_k=2),
    Tiling(64, True, split_k=7),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("row_blocks", [1, 5, 32, 112, 1003])
@pytest.mark.parametrize("stages", [1, 9, 32, 112])
@pytest.mark.parametrize("n_tokens", [1, 8, 65, 512, 700])
def test_every_stage_is_of_one_cta(
    tiling: Tiling, row_blocks: int, stages: int, n_tokens: int
) -> None:
    """Every stage belongs to one CTA, as part of a whole tile or of a range that the next CTA
    continues.
    """
    try:
        schedule = tiling.schedule(row_blocks, n_tokens, stages, N_SMS)
    except ValueError:
        assert tiling.split_k
        return
    d = tile_scheduler_args(schedule, stages)
    by_cta = work_tiles(d, schedule.ctas)
    times = np.zeros((schedule.tiles, stages), int)
    for own in by_cta:
        assert own, "a block without work"
        for tile, first, last in own:
            times[tile, first:last] += 1
    assert (times == 1).all()
    split_tiles = [work for own in by_cta for work in own if work[1:] != (0, stages)]
    assert split_tiles == sorted(split_tiles)
    tiles = np.arange(schedule.tiles)
    assert np.array_equal(divided(tiles, d.inverse_token_blocks), tiles // schedule.token_blocks)
