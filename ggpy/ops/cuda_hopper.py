"""Products of many tokens on Hopper: packed activations, from wherever they come, times tiles.

Knows when this product is the right one, and in which order it wants activations; whoever makes
these asks `order` first, and may then leave them packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..device.base import Buffer
from ..kernels.handed import MOST_TOKENS, Handed
from ..kernels.hopper import has_wgmma
from ..kernels.mul_mat_wgmma import MulMatWgmma
from ..kernels.pack import PLAIN, Pack, order_of, packed_bytes
from ..kernels.product import Epilogue
from ..kernels.tile import Layout, TiledMatrix
from .cuda_arrays import Array, Memory

FROM_TOKENS = 5  # fewer are faster by MulMatTile


class HopperProducts:
    """Multiplies with MulMatWgmma where the GPU has it."""

    def __init__(self, device: Any, room: Callable[[str, int], Buffer]) -> None:
        """room(name, bytes): scratch memory."""
        there = has_wgmma(device.arch)
        self._product = MulMatWgmma(device, device.sm_count) if there else None
        self._pack, self._room = Pack(device), room
        self.allowed = True  # weights may be rounded to halves

    def takes(self, n_tokens: int) -> bool:
        """Whether so many tokens are multiplied here."""
        return self._product is not None and self.allowed and n_tokens >= FROM_TOKENS

    def hands_on(self, n_tokens: int) -> bool:
        """Whether products of so many tokens hand norms on."""
        return self.takes(n_tokens) and n_tokens <= MOST_TOKENS

    def order(self, layouts: list[Layout | None], n_tokens: int) -> int:
        """In which order x should come for weights of these layouts; None has no tiles."""
        orders = {order_of(layout) if layout else PLAIN for layout in layouts}
        return orders.pop() if self.takes(n_tokens) and len(orders) == 1 else PLAIN

    def multiply(
        self,
        x: Array,
        tiles: list[TiledMatrix],
        outs: list[Array],
        epilogue: Epilogue,
        activation: str,
        just_made: bool = False,
        handed: Handed | None = None,
    ) -> None:
        """outs[i] = epilogue(x tiles[i]^T) for tiles of one layout; see Products.multiply.

        just_made: by a kernel before, so that they must not be read ahead of its end.
        """
        assert self._product is not None
        n = outs[0].shape[0]
        self._product.launch(
            tiles,
            self._packed(x, n, order_of(tiles[0].layout)),
            [out.data for out in outs],
            n,
            epilogue=epilogue,
            activation=activation,
            order=outs[0].order,
            late=x.late,
            handed=handed,
            pdl=not just_made,
        )

    def _packed(self, x: Array, n_tokens: int, order: int) -> Memory:
        if x.order == order:
            return x.data
        if x.order != PLAIN:
            raise RuntimeError("activations were packed for tiles of another kind")
        k = x.shape[-1]
        packed = self._room("packed", packed_bytes(n_tokens, k))
        self._pack.launch(x.data, packed, n_tokens, k, order)
        return packed
