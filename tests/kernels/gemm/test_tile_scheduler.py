"""Schedules of products by name: which is taken for a shape, and that each deals everything out."""

from __future__ import annotations

import pytest
from dealt_cases import shares
from hypothesis import given
from hypothesis import strategies as st

from ggpy.kernels.gemm.gemm_wgmma import TILES
from ggpy.kernels.gemm.hopper import dealt
from ggpy.kernels.gemm.tile_scheduler import TOKENS, Cut, Stages, Tiles, fastest
from ggpy.kernels.w8a8.w8a8_wgmma import TILES as OF_CODES

SMS = 132  # of an H200
STAGES = {k: Stages(k // 128, 128, 8.5) for k in (4096, 8192, 14336)}  # of a row of Q8_0


def chosen(tiles: Tiles, rows: int, k: int, n: int) -> tuple[str, int]:
    """The schedule's name, and the tokens of a tile."""
    row_blocks = -(-rows // 128)
    cut = fastest(tiles, row_blocks, n, STAGES[k], SMS)
    return cut.deal(row_blocks, n, STAGES[k].count, SMS).name, cut.tokens


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
    ],
)
def test_what_is_taken(rows, k, n, name):
    assert chosen(TILES, rows, k, n) == name


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
def test_what_is_taken_of_codes(rows, k, n, of_int8, of_e4m3):
    """E4M3 has no tiles of 256 tokens."""
    assert chosen(OF_CODES["int8"], rows, k, n) == of_int8
    assert chosen(OF_CODES["e4m3"], rows, k, n) == (of_e4m3 or of_int8)


CUTS = [
    Cut(t, split, pieces=pieces, whole_first=whole)
    for t in TOKENS
    for split, pieces, whole in (
        (False, 0, True),
        (True, 0, True),
        (True, 0, False),
        (True, 2, True),
    )
]


def work(cut, row_blocks, n, stages, sms):
    """(tile, stage) of each block."""
    s = cut.deal(row_blocks, n, stages, sms)
    for mine in shares(dealt(s, stages), s.blocks):
        for tile, first, last in mine:
            yield from ((tile, stage) for stage in range(first, last))


@given(
    cut=st.sampled_from(CUTS),
    row_blocks=st.integers(1, 40),
    n=st.integers(1, 700),
    stages=st.sampled_from((1, 2, 6, 16)),
    sms=st.sampled_from((1, 4, 13)),
)
def test_every_stage_of_every_tile_once(cut, row_blocks, n, stages, sms):
    try:
        found = list(work(cut, row_blocks, n, stages, sms))
    except ValueError:
        assert cut.pieces
        return
    tiles = row_blocks * -(-n // cut.tokens)
    assert sorted(found) == [(tile, stage) for tile in range(tiles) for stage in range(stages)]


@given(
    row_blocks=st.integers(1, 1100),
    n=st.integers(1, 4096),
    stages=st.integers(1, 120),
    bits=st.sampled_from((2.625, 8.5, 16.0)),
)
def test_no_more_blocks_than_run_at_the_same_time(row_blocks, n, stages, bits):
    """Where blocks wait for each other's sums."""
    cut = fastest(TILES, row_blocks, n, Stages(stages, 128, bits), SMS)
    schedule = cut.deal(row_blocks, n, stages, SMS)
    assert 1 <= schedule.blocks <= SMS * cut.per_multiprocessor
    assert schedule.token_blocks * cut.tokens >= n


def test_names():
    def name(cut, tiles=100, n=2, stages=16, sms=13):
        return cut.deal(tiles, n, stages, sms).name

    assert name(Cut(16, False)) == "data-parallel"
    assert name(Cut(256, False, pairs=True), sms=12) == "data-parallel, pairs"
    assert name(Cut(16, True)) == "stream-K"
    assert name(Cut(128, True), n=256) == "data-parallel + stream-K"
    assert name(Cut(128, True), tiles=13, n=256) == "data-parallel"  # nothing is left to share
    assert name(Cut(128, True, whole_first=False), n=256) == "stream-K"
    assert name(Cut(16, True, pieces=4), tiles=6) == "split-K 4"


def test_pieces_that_cannot_be():
    """Blocks that wait for others which cannot start would wait for ever."""
    with pytest.raises(ValueError, match="7 tiles of 16 stages cannot be split in 4 each: 26 bl"):
        Cut(16, True, pieces=4).deal(7, 2, 16, 13)
    with pytest.raises(ValueError, match="cannot be split in 3 each"):
        Cut(16, True, pieces=3).deal(7, 2, 16, 13)
    assert Cut(16, True, pieces=2).deal(13, 2, 16, 13).blocks == 26


@pytest.mark.parametrize(
    ("cut", "row_blocks", "n", "sms", "sharers"),
    [
        (Cut(256, False, pairs=True), 32, 2048, SMS, 2),
        (Cut(256, False, pairs=True), 2, 8, SMS, 2),
        (Cut(256, False, pairs=True), 33, 2048, SMS, 1),  # the last rows would have no neighbours
        (Cut(256, False, pairs=True), 32, 2048, 131, 1),  # a block would be left over
        (Cut(256, True, pairs=True), 32, 2048, SMS, 1),
        (Cut(128, False, pairs=True), 32, 2048, SMS, 1),
        (Cut(256, False), 32, 2048, SMS, 1),
    ],
)
def test_who_shares_activations(cut, row_blocks, n, sms, sharers):
    assert cut.deal(row_blocks, n, 32, sms).sharers == sharers
