"""How contexts of decode steps are cut, and how many numbers of splits are launched."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from counting_device import LaunchesOnHopper

from ggpy.backends.cuda.steps.splits import plan_decode_tiles
from ggpy.kernels.attention.paged_attention import (
    MAX_SPLIT,
    POSITIONS_PER_SPLIT,
    PagedAttention,
    plan_tiles,
)
from ggpy.kernels.attention.rope_kv import Heads

HEADS = Heads(n_head=32, n_head_kv=8, head_size=128, page_size=64)
MAX_TOKENS = 64


def kernels(**options: bool) -> SimpleNamespace:
    device = LaunchesOnHopper()
    decode = PagedAttention(device, HEADS, MAX_TOKENS, device.shared_bytes, **options)
    return SimpleNamespace(heads=HEADS, decode=decode)


def launched(positions: list[int]) -> int:
    every = np.arange(len(positions), dtype=np.int32)
    return plan_decode_tiles(np.array(positions, np.int32), every, kernels(), MAX_TOKENS)[1]


@pytest.mark.parametrize(
    ("n", "end", "expected"),
    [(1, 1000, {8}), (4, 1000, {4, 8}), (8, 4000, {4}), (16, 4000, {2}), (64, 4000, {1})],
)
def test_few_numbers_while_contexts_grow(n: int, end: int, expected: set[int]) -> None:
    """Of sequences that are a few tokens apart."""
    assert {launched([i + 3 * j for j in range(n)]) for i in range(0, end, 7)} == expected


def test_long_contexts_have_more_splits_than_others() -> None:
    assert launched([100] * 7 + [8000]) == MAX_SPLIT
    assert launched([1000] * 7 + [3000]) == 15
    assert launched([500] * 63 + [3000]) == 8


@pytest.mark.parametrize("seed", range(20))
def test_only_rounding_takes_splits_away(seed: int) -> None:
    """As many splits as `plan_tiles` says, or the share by whole splits at least; a tile without a
    split has no slot.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 65))
    positions = rng.integers(0, rng.integers(2, 9000), n).astype(np.int32)
    every, k = np.arange(n, dtype=np.int32), kernels()
    tiles, most = plan_decode_tiles(positions, every, k, MAX_TOKENS)
    resident = k.decode.resident_splits(n)
    sizes = {"resident_splits": resident, "max_split_tokens": MAX_TOKENS}
    usual = plan_tiles(positions, every, HEADS, **sizes)
    assert resident and (tiles[:, 2] <= usual[:, 2]).all() and tiles[:, 2].max() <= most
    full = positions // POSITIONS_PER_SPLIT
    share = full * resident // max(1, full.sum() + n - 1)
    assert (tiles[:, 2] >= np.minimum(usual[:, 2], share)).all()
    assert ((tiles[:, 3] < 0) == (tiles[:, 2] == 1)).all()
    slots = tiles[tiles[:, 3] >= 0, 3]
    assert len(set(slots.tolist())) == len(slots) and (slots < MAX_TOKENS).all()


def test_an_answer_whose_bits_are_its_own_has_splits_by_its_position() -> None:
    """With few tokens, or whatever the batch."""
    for n, options in ((4, {}), (24, {"batch_invariant": True})):
        positions = np.arange(n, dtype=np.int32) * 97
        k = kernels(**options)
        tiles, _ = plan_decode_tiles(positions, np.arange(n, dtype=np.int32), k, MAX_TOKENS)
        assert (tiles[:, 2] == np.minimum(positions // POSITIONS_PER_SPLIT + 1, MAX_SPLIT)).all()
