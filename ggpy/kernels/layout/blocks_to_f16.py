"""Launches cuda/layout/blocks_to_f16.cu: blocks of any format -> halves, in tiles or in rows, for products of
many tokens with formats that have no tiles of their own. Knows no product.
"""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from ..blocks.block_kernel import BlockMatrix, block_kernel, require
from .tile import ROWS, Layout, TiledMatrix

THREADS = 256
COLUMNS = 256  # of a block of threads
TILES = Layout(16, 32, "D", 64)  # of halves


def halve_to_tiles(device: Device, w: BlockMatrix, out: Address) -> TiledMatrix:
    """Enqueue out = w as tiles of halves, saturated; ValueError if out is too small."""
    require(out, TILES.nbytes(w.rows, w.columns), f"tiles of halves [{w.rows}, {w.columns}]")
    _launch(device, w, out, True)
    return TiledMatrix(TILES, w.rows, w.columns, out)


def halve_to_rows(device: Device, w: BlockMatrix, out: Address) -> None:
    """Enqueue half out[rows, columns] = w, saturated; ValueError if out is too small."""
    require(out, 2 * w.rows * w.columns, f"halves [{w.rows}, {w.columns}]")
    _launch(device, w, out, False)


def _launch(device: Device, w: BlockMatrix, out: Address, tiled: bool) -> None:
    if w.columns % 8:
        raise ValueError(f"rows of {w.columns} columns: halves come in eights")
    kernel = block_kernel(
        device, "layout/blocks_to_f16.cu", "blocks_to_f16", w.format, "true" if tiled else "false"
    )
    grid = -(-w.columns // COLUMNS), -(-w.rows // ROWS)
    kernel.launch(grid, THREADS, (w.data, out, w.rows, w.columns))
