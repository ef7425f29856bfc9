"""Launches cuda/layout/dequantize_tile.cu: dequantises tiles to f16 rows. Knows no GEMM."""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from ..blocks.block_kernel import require
from .tile import Layout, TiledMatrix

CHUNKS = 4  # chunks per CTA


class DequantizeTile:
    """The kernel of a device; an instance is compiled at its first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[Layout, Kernel] = {}

    def launch(self, w: TiledMatrix, out: Address) -> None:
        """Enqueue f16 out[n_rows, k] = w, saturated. Raises ValueError if out is too small."""
        require(out, 2 * w.n_rows * w.k, f"f16 [{w.n_rows}, {w.k}]")
        layout = w.layout
        if layout not in self._kernels:
            name = f"dequantize_tile<{layout.type_name}>"
            self._kernels[layout] = self.device.kernel("layout/dequantize_tile.cu", name)
        grid = -(-layout.chunks(w.k) // CHUNKS), w.tile_rows
        self._kernels[layout].launch(grid, 32 * CHUNKS, (w.data, out, w.n_rows, w.k))
