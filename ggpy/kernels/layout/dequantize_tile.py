"""Launches cuda/layout/dequantize_tile.cu: tiles -> rows of halves. Knows no product."""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from ..blocks.block_kernel import require
from .tile import Layout, TiledMatrix

CHUNKS = 4  # of a block of threads


class DequantizeTile:
    """Instances are compiled as they are asked for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[Layout, Kernel] = {}

    def launch(self, w: TiledMatrix, out: Address) -> None:
        """Enqueue half out[n_rows, k] = w, saturated; ValueError if out is too small."""
        require(out, 2 * w.n_rows * w.k, f"halves [{w.n_rows}, {w.k}]")
        layout = w.layout
        if layout not in self._kernels:
            name = f"dequantize_tile<{layout.type_name}>"
            self._kernels[layout] = self.device.kernel("layout/dequantize_tile.cu", name)
        grid = -(-layout.chunks(w.k) // CHUNKS), w.tile_rows
        self._kernels[layout].launch(grid, 32 * CHUNKS, (w.data, out, w.n_rows, w.k))
