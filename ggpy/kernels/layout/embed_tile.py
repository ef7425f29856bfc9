"""Launches cuda/layout/embed_tile.cu: token embedding from a tiled table."""

from __future__ import annotations

from ...device.base import Device, Kernel
from ..address import Address
from .tile import Layout, TiledMatrix

THREADS = 256
CTAS = 128  # target number of CTAs: they hide the latency of the dependent loads of a row


class EmbedTile:
    """x[t] = table[ids[t]] * scale. A negative id ~r stands for sampled[r]."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._tiled: dict[Layout, Kernel] = {}

    def launch(
        self,
        table: TiledMatrix,
        ids: Address,
        sampled: Address,
        x: Address,
        n_tokens: int,
        scale: float,
    ) -> None:
        """Enqueue float x[n_tokens, k] = table[ids] * scale; ids and sampled are int32."""
        layout = table.layout
        if layout not in self._tiled:
            self._tiled[layout] = self.device.kernel(
                "layout/embed_tile.cu", f"embed_tile<{layout.type_name}>"
            )
        where = (table.data, table.row_scale, ids, sampled, x)
        sizes = (table.k, layout.chunks(table.k), float(scale))
        grid = n_tokens, min(-(-table.k // THREADS), max(1, CTAS // n_tokens))
        self._tiled[layout].launch(grid, THREADS, (*where, *sizes), pdl=True)
