"""Tile schedules by name: which one is chosen for a shape, and that each assigns every stage
once.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tile_scheduler_cases import work_tiles

from ggpy.kernels.gemm.gemm_wgmma import TILE_COSTS
from ggpy.kernels.gemm.hopper import tile_scheduler_args
from ggpy.kernels.gemm.tile_scheduler import TOKENS, KStages, TileCosts, Tiling, fastest
from ggpy.kernels.w8a8.w8a8_wgmma import TILE_COSTS as OF_CODES

SMS = 132  # SMs of an H200
STAGES = {k: KStages(k // 128, 128, 8.5) for k in (4096, 8192, 14336)}  # stages of a row of Q8_0


def chosen(tiles: TileCosts, rows: int, k: int, n: int) -> tuple[str, int]:
    """The schedule's name, and the tokens of a tile."""
    row_blocks = -(-rows // 128)
    tiling = fastest(tiles, row_blocks, n, STAGES[k], SMS)
    return tiling.schedule(row_blocks, n, STAGES[k].count, SMS).name, tiling.tokens


@pytest.mark.parametrize(
    ("rows", "k", "n", "name"),
    [
        (14336, 4096, 8, ("stream-K", 8)),
        (14336, 4096, 16, ("stream-K", 16)),
        (14336, 4096, 64, ("split-K 2", 64)),
        (28672, 4096, 64, ("data-parallel", 64)),
        (4096, 14336, 64, ("split-K 8", 64)),
        (6144, 4096, 128, ("split-K 2", 128)),
        (4096, 4096, 128, ("split-K 4", 128)),
        (14336, 4096, 512, ("data-parallel, pairs", 256)),
        (14336, 4096, 2048, ("data-parallel, pairs", 256)),
        (4096, 14336, 16, ("stream-K", 16)),
        (4096, 14336, 512, ("split-K 2", 256)),
        (4096, 4096, 512, ("data-parallel", 128)),
        (4096, 14336, 384, ("split-K 2", 256)),
        (2048, 8192, 512, ("split-K 2", 128)),
        (2048, 8192, 1024, ("split-K 2", 256)),
        (4096, 14336, 2048, ("data-parallel, pairs", 256)),
        (4096, 4096, 300, ("data-parallel", 128)),
        # few work tiles: two of half the size
        (256, 4096, 64, ("split-K 8", 32)),
        (1536, 4096, 33, ("split-K 8", 32)),
        (1536, 4096, 32, ("split-K 8", 32)),
        (1664, 4096, 64, ("split-K 8", 64)),
        (1024, 4096, 128, ("split-K 8", 64)),
        (1664, 4096, 128, ("split-K 4", 128)),
    ],
)
def test_chosen_schedule(rows, k, n, name):
    assert chosen(TILE_COSTS, rows, k, n) == name


@pytest.mark.parametrize(
    ("rows", "k", "n", "of_int8", "of_e4m3"),
    [
        (4096, 4096, 16, ("split-K 4", 16), None),
        (28672, 4096, 64, ("data-parallel", 64), None),
        (6144, 4096, 128, ("data-parallel", 64), None),
        (4096, 4096, 100, ("split-K 2", 64), None),
        (28672, 4096, 128, ("data-parallel", 128), None),
        (2048, 8192, 128, ("split-K 4", 64), None),
        (4096, 14336, 256, ("split-K 2", 128), None),
        (28672, 4096, 512, ("data-parallel", 256), ("data-parallel", 128)),
        (4096, 14336, 512, ("split-K 2", 256), ("data-parallel", 128)),
        (6144, 4096, 2048, ("data-parallel", 256), ("data-parallel", 128)),
    ],
)
def test_chosen_schedule_of_w8a8(rows, k, n, of_int8, of_e4m3):
    """E4M3 has no tiles of 256 tokens."""
    assert chosen(OF_CODES["int8"], rows, k, n) == of_int8
    assert chosen(OF_CODES["e4m3"], rows, k, n) == (of_e4m3 or of_int8)


TILINGS = [
    Tiling(t, split, split_k=split_k, whole_waves_first=whole)
    for t in TOKENS
    for split, split_k, whole in (
        (False, 0, True),
        (True, 0, True),
        (True, 0, False),
        (True, 2, True),
        (True, 5, True),
    )
]


def work(tiling, row_blocks, n, stages, sms):
    """(tile, stage) pairs of each CTA."""
    s = tiling.schedule(row_blocks, n, stages, sms)
    for own in work_tiles(tile_scheduler_args(s, stages), s.ctas):
        for tile, first, last in own:
            yield from ((tile, stage) for stage in range(first, last))


@given(
    tiling=st.sampled_from(TILINGS),
    row_blocks=st.integers(1, 40),
    n=st.integers(1, 700),
    stages=st.sampled_from((1, 2, 6, 16)),
    sms=st.sampled_from((1, 4, 13)),
)
def test_every_stage_of_every_tile_once(tiling, row_blocks, n, stages, sms):
    try:
        found = list(work(tiling, row_blocks, n, stages, sms))
    except ValueError:
        assert tiling.split_k
        return
    tiles = row_blocks * -(-n // tiling.tokens)
    assert sorted(found) == [(tile, stage) for tile in range(tiles) for stage in range(stages)]


@given(
    row_blocks=st.integers(1, 1100),
    n=st.integers(1, 4096),
    stages=st.integers(1, 120),
    bits=st.sampled_from((2.625, 8.5, 16.0)),
)
def test_no_more_ctas_than_are_resident(row_blocks, n, stages, bits):
    """For schedules in which CTAs wait for each other's sums."""
    tiling = fastest(TILE_COSTS, row_blocks, n, KStages(stages, 128, bits), SMS)
    schedule = tiling.schedule(row_blocks, n, stages, SMS)
    assert 1 <= schedule.ctas <= SMS * tiling.ctas_per_sm
    assert schedule.token_blocks * tiling.tokens >= n


def test_names():
    def name(tiling, tiles=100, n=2, stages=16, sms=13):
        return tiling.schedule(tiles, n, stages, sms).name

    assert name(Tiling(16, False)) == "data-parallel"
    assert name(Tiling(256, False, pairs=True), sms=12) == "data-parallel, pairs"
    assert name(Tiling(16, True)) == "stream-K"
    assert name(Tiling(128, True), n=256) == "data-parallel + stream-K"
    assert name(Tiling(128, True), tiles=13, n=256) == "data-parallel"  # no tile is left to share
    assert name(Tiling(128, True, whole_waves_first=False), n=256) == "stream-K"
    assert name(Tiling(16, True, split_k=4), tiles=6) == "split-K 4"


def test_impossible_splits_are_refused():
    """CTAs that wait for CTAs that cannot start would wait forever."""
    with pytest.raises(ValueError, match="7 tiles of 16 stages cannot be split in 4 each: 26 C"):
        Tiling(16, True, split_k=4).schedule(7, 2, 16, 13)
    with pytest.raises(ValueError, match="2 stages cannot be split in 3 each"):
        Tiling(16, True, split_k=3).schedule(7, 2, 2, 13)
    assert Tiling(16, True, split_k=2).schedule(13, 2, 16, 13).ctas == 26


@pytest.mark.parametrize(
    ("tiling", "row_blocks", "n", "sms", "cluster"),
    [
        (Tiling(256, False, pairs=True), 32, 2048, SMS, 2),
        (Tiling(256, False, pairs=True), 2, 8, SMS, 2),
        (
            Tiling(256, False, pairs=True),
            33,
            2048,
            SMS,
            1,
        ),  # the last rows would have no pair
        (Tiling(256, False, pairs=True), 32, 2048, 131, 1),  # a CTA would have no pair
        (Tiling(256, True, pairs=True), 32, 2048, SMS, 1),
        (Tiling(128, False, pairs=True), 32, 2048, SMS, 1),
        (Tiling(256, False), 32, 2048, SMS, 1),
    ],
)
def test_pairs_share_activations(tiling, row_blocks, n, sms, cluster):
    assert tiling.schedule(row_blocks, n, 32, sms).cluster == cluster
