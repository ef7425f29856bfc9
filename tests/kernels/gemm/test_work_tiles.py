"""How work is dealt out on Hopper: the numbers that a launch hands over, for blocks that do not
divide.
"""

from __future__ import annotations

import numpy as np
import pytest
from dealt_cases import divided, shares

from ggpy.kernels.gemm.hopper import dealt, inverse
from ggpy.kernels.gemm.tile_scheduler import Cut

MULTIPROCESSORS = 132


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 32, 56, 57, 111, 112, 208, 416, 1000])
def test_an_inverse_divides(divisor: int) -> None:
    """All that a product of a model may have: x * divisor < 2^32."""
    most = min(1 << 22, (1 << 32) // divisor)
    x = np.concatenate([np.arange(1 << 16), np.arange(most - (1 << 16), most)])
    assert 0 <= inverse(divisor) < 1 << 32
    assert np.array_equal(divided(x, inverse(divisor)), x // divisor)


CUTS = [Cut(8, True), Cut(64, True), Cut(128, False), Cut(256, True), Cut(256, True, pieces=2)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("row_blocks", [1, 5, 32, 112, 1003])
@pytest.mark.parametrize("stages", [1, 9, 32, 112])
@pytest.mark.parametrize("n_tokens", [1, 8, 65, 512, 700])
def test_every_stage_is_one_blocks(cut: Cut, row_blocks: int, stages: int, n_tokens: int) -> None:
    """Once, and in whole tiles or stretches that go on in the next block."""
    try:
        schedule = cut.deal(row_blocks, n_tokens, stages, MULTIPROCESSORS)
    except ValueError:
        assert cut.pieces
        return
    d = dealt(schedule, stages)
    by_block = shares(d, schedule.blocks)
    times = np.zeros((schedule.tiles, stages), int)
    for mine in by_block:
        assert mine, "a block without work"
        for tile, first, last in mine:
            times[tile, first:last] += 1
    assert (times == 1).all()
    cut_shares = [share for mine in by_block for share in mine if share[1:] != (0, stages)]
    assert cut_shares == sorted(cut_shares)
    tiles = np.arange(schedule.tiles)
    assert np.array_equal(divided(tiles, d.by_token_blocks), tiles // schedule.token_blocks)
