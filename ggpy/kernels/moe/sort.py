"""Launches cuda/moe/sort.cu: the (token, expert) pairs of a step, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

from ...device.base import Device
from ..address import Address

THREADS = 1024
WORK_BYTES = 16  # of a work tile


@dataclass(frozen=True)
class SortedPairs:
    """Memory of a sorted step: int pair_of[n_pairs] of each row, int row_of[n_pairs] of each pair,
    and work tiles of up to tile_rows rows.
    """

    pair_of: Address
    row_of: Address
    work: Address
    tile_rows: int


def work_tiles(n_pairs: int, n_expert: int, tile_rows: int) -> int:
    """Work tiles at most: an expert without whole tiles has one that is not full."""
    return min(n_pairs, n_pairs // tile_rows + n_expert)


class SortPairs:
    """The kernel that sorts."""

    def __init__(self, device: Device) -> None:
        self._sort = device.kernel("moe/sort.cu", "sort_pairs")

    def launch(self, ids: Address, out: SortedPairs, n_pairs: int, n_expert: int) -> None:
        """Enqueue the sorting of ids, int [n_pairs], each of them below n_expert <= 1024."""
        sizes = n_pairs, out.tile_rows, work_tiles(n_pairs, n_expert, out.tile_rows)
        self._sort.launch(1, THREADS, (ids, out.pair_of, out.row_of, out.work, *sizes), pdl=True)
