"""Random experts in tiles, and sorted pairs of tokens and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernel_buffers import Output, upload
from tile_cases import Weights, exact

from ggpy.kernels.layout.tile import TiledMatrix, repack
from ggpy.kernels.moe.sort import PACKED_UNIT, SortedPairs, SortPairs, packed_rows, work_tiles

ROUNDED = 1e-6  # error bound for weights that are rounded to f16


class Experts:
    """X random matrices [rows, columns] of one format, one after the other in tiles."""

    def __init__(
        self, device: Any, name: str, n: int, rows: int, columns: int, seed: int = 0
    ) -> None:
        self.each = [Weights(name, rows, columns, 100 * seed + i) for i in range(n)]
        layout = self.each[0].layout
        nbytes = layout.nbytes(rows, columns)
        data = device.alloc(n * nbytes, "experts")
        for i, w in enumerate(self.each):
            raw = upload(device, w.blocks)
            repack(device, w.format, raw, rows, columns, data.at(i * nbytes))
        self.tiles = TiledMatrix(layout, rows, columns, data)

    def exact(self, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
        """float64 y[pair] of x[pair]."""
        return np.stack([exact(self.each[e], row[None])[0] for e, row in zip(ids, x, strict=True)])


def sorted_pairs(
    device: Any, ids: np.ndarray, n_expert: int, tile: int = 16, packed: bool = False
) -> tuple[SortedPairs, list[np.ndarray]]:
    """The memory of a sorted step; pair_of, row_of and work tiles."""
    n, n_work = len(ids), work_tiles(len(ids), n_expert, tile)
    n_rows = packed_rows(n, n_expert) if packed else n
    outs = [Output(device, 4 * n_rows), Output(device, 4 * n), Output(device, 16 * n_work)]
    memory = SortedPairs(*(out.buffer for out in outs), tile, PACKED_UNIT if packed else 1, n_rows)
    SortPairs(device).launch(upload(device, ids), memory, n, n_expert)
    shapes: list[tuple[int, ...]] = [(n_rows,), (n,), (n_work, 4)]
    return memory, [out.read(np.int32, s) for out, s in zip(outs, shapes, strict=True)]
