"""The sizes of a KV cache: reserved for each sequence, or fewer positions that all share."""

from __future__ import annotations

import pytest

from ggpy.arch.cache import CacheGroups
from ggpy.backends.interface import PAGE_SIZE, CacheShape, PagedKV

N_CTX, N_BATCH = 20 * PAGE_SIZE, PAGE_SIZE
WHOLE = PagedKV(2, 1, 8, 8)
WINDOW = PagedKV(2, 1, 8, 8, window=100)  # 4 pages: those of a step, and what its first token sees


def shape(n_seq: int, n_positions: int | None) -> CacheShape:
    groups = CacheGroups([WHOLE, WINDOW, WHOLE])
    return groups.shape(n_seq, N_CTX, N_BATCH, n_positions)


@pytest.mark.parametrize(
    ("n_positions", "whole", "window"),
    [
        (None, 8 * 20, 8 * 4),
        (N_CTX, 20, 20),
        (N_CTX + 1, 21, 21),
        (50 * PAGE_SIZE, 50, 8 * 4),  # a window never lacks a page with those
        (500 * PAGE_SIZE, 500, 8 * 4),
    ],
)
def test_pages_are_those_of_the_positions(n_positions, whole, window):
    found = shape(8, n_positions).groups
    assert [group.n_pages for group in found] == [whole, window]
    assert [group.limit for group in found] == [20, 4], "of one sequence, whatever is shared"
    assert [group.layers for group in found] == [(0, 2), (1,)]


def test_one_sequence_must_fit():
    with pytest.raises(ValueError, match=r"KV cache has 1279 positions, a context 1280: raise n_p"):
        shape(8, N_CTX - 1)
