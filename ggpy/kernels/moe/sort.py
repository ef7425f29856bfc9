"""Launches cuda/moe/sort.cu: the (token, expert) pairs of a step, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

from ...device.base import Device
from ..address import Address

THREADS = 1024
WORK_BYTES = 16  # of a work tile
PACKED_UNIT = 8  # rows of packed activations that lie together


@dataclass(frozen=True)
class SortedPairs:
    """Memory of a sorted step: int pair_of[n_rows] of each row, int row_of[n_pairs] of each pair,
    and work tiles of up to tile_rows rows.

    unit: the rows of an expert begin at a multiple of it; pair_of is -1 in the rows between. There
    are n_rows rows, or with a unit of 1 as many as pairs.
    """

    pair_of: Address
    row_of: Address
    work: Address
    tile_rows: int
    unit: int = 1
    n_rows: int = 0


def work_tiles(n_pairs: int, n_expert: int, tile_rows: int) -> int:
    """Work tiles at most: an expert without whole tiles has one that is not full."""
    return min(n_pairs, n_pairs // tile_rows + n_expert)


def packed_rows(n_pairs: int, n_expert: int) -> int:
    """Rows at most, if those of an expert begin at multiples of PACKED_UNIT."""
    most = n_pairs + (PACKED_UNIT - 1) * min(n_pairs, n_expert)
    return -(-most // PACKED_UNIT) * PACKED_UNIT


class SortPairs:
    """The kernel that sorts."""

    def __init__(self, device: Device) -> None:
        self._sort = device.kernel("moe/sort.cu", "sort_pairs")

    def launch(self, ids: Address, out: SortedPairs, n_pairs: int, n_expert: int) -> None:
        """Enqueue the sorting of ids, int [n_pairs], each of them below n_expert <= 1024."""
        memory, n_work = (
            (out.pair_of, out.row_of, out.work),
            work_tiles(n_pairs, n_expert, out.tile_rows),
        )
        sizes = n_pairs, out.tile_rows, n_work, out.unit, out.n_rows or n_pairs
        self._sort.launch(1, THREADS, (ids, *memory, *sizes), pdl=True)
