"""Launches cuda/moe/sort.cu: the (token, expert) pairs of a step, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

from ...device.base import Device
from ..address import Address
from ..gemm.gemm_prefill import TOKENS as TILE_ROWS  # rows of a work tile

THREADS = 1024
WORK_BYTES = 16  # of a work tile


@dataclass(frozen=True)
class SortedPairs:
    """Memory of a sorted step: int pair_of[n_pairs] of each row, int row_of[n_pairs] of each pair,
    and work tiles.
    """

    pair_of: Address
    row_of: Address
    work: Address


def work_tiles(n_pairs: int, n_expert: int) -> int:
    """Work tiles at most: an expert without whole tiles has one that is not full."""
    return min(n_pairs, n_pairs // TILE_ROWS + n_expert)


class SortPairs:
    """The kernels that sort, and that gather rows in that order."""

    def __init__(self, device: Device) -> None:
        self._sort, self._gather = device.kernels("moe/sort.cu", ["sort_pairs", "gather_rows"])

    def launch(self, ids: Address, out: SortedPairs, n_pairs: int, n_expert: int) -> None:
        """Enqueue the sorting of ids, int [n_pairs], each of them below n_expert <= 1024."""
        sizes = n_pairs, n_expert, TILE_ROWS, work_tiles(n_pairs, n_expert)
        self._sort.launch(1, THREADS, (ids, out.pair_of, out.row_of, out.work, *sizes), pdl=True)

    def gather(
        self, x: Address, pair_of: Address, out: Address, n_pairs: int, n_used: int, k: int
    ) -> None:
        """Enqueue f16 out[row] = x[pair_of[row] / n_used]; k is a multiple of 8."""
        self._gather.launch(n_pairs, 128, (x, pair_of, out, n_used, k), pdl=True)
