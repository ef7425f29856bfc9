"""Launches cuda/layout/blocks_to_f16.cu: dequantises quant blocks to f16 tiles or f16 rows.

Prefill GEMMs use it for formats without a tile layout. This module knows no GEMM.
"""

from __future__ import annotations

from ...device.base import Device
from ..address import Address
from ..blocks.block_kernel import BlockMatrix, block_kernel, require
from .tile import ROWS, Layout, TiledMatrix

THREADS = 256
COLUMNS = 256  # columns per CTA
F16_TILES = Layout(16, 32, "D", 64)  # the layout of f16 tiles


def blocks_to_f16_tiles(device: Device, w: BlockMatrix, out: Address) -> TiledMatrix:
    """Enqueue out = w as f16 tiles, saturated. Raises ValueError if out is too small."""
    require(out, F16_TILES.nbytes(w.rows, w.columns), f"f16 tiles [{w.rows}, {w.columns}]")
    _launch(device, w, out, True)
    return TiledMatrix(F16_TILES, w.rows, w.columns, out)


def blocks_to_f16_rows(device: Device, w: BlockMatrix, out: Address) -> None:
    """Enqueue f16 out[rows, columns] = w, saturated. Raises ValueError if out is too small."""
    require(out, 2 * w.rows * w.columns, f"f16 [{w.rows}, {w.columns}]")
    _launch(device, w, out, False)


def _launch(device: Device, w: BlockMatrix, out: Address, tiled: bool) -> None:
    if w.columns % 8:
        raise ValueError(f"rows of {w.columns} columns: f16 weights need a multiple of 8")
    kernel = block_kernel(
        device, "layout/blocks_to_f16.cu", "blocks_to_f16", w.format, "true" if tiled else "false"
    )
    grid = -(-w.columns // COLUMNS), -(-w.rows // ROWS)
    kernel.launch(grid, THREADS, (w.data, out, w.rows, w.columns))
