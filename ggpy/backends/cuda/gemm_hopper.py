"""Products of several tokens on Hopper: packed activations, from wherever they come, times tiles.

Knows which product is the right one, and in which order it wants activations; whoever makes
these asks `order` first, and may then leave them packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...device.base import Buffer
from ...kernels.attention.rope_kv import Turning
from ...kernels.gemm.gemm import Epilogue
from ...kernels.gemm.gemm_skinny import MulMatFew
from ...kernels.gemm.gemm_wgmma import HANDED_TOKENS, MulMatWgmma
from ...kernels.gemm.hopper import ROW_BLOCK, LeftSums, has_wgmma
from ...kernels.layout.pack import PLAIN, UNIT, Pack, order_of, packed_bytes
from ...kernels.layout.tile import ROWS, Layout, TiledMatrix
from ...kernels.norm.deferred_norm import MOST_TOKENS, Handed
from .arrays import Array, Memory

FROM_TOKENS = 5  # fewer are faster by MulMatTile;
FEW_FROM_TOKENS, FEW_TOKENS = 2, 16  # where MulMatFew is `faster`, fewer than these, at most,
FEW_COLUMNS = 2048  # which it is of matrices with so many columns or more;
PAIR, PAIR_SIZE = 2, 4096  # of so many tokens, with so many columns and rows


class HopperProducts:
    """Multiplies with MulMatFew and MulMatWgmma where the GPU has what the latter takes."""

    def __init__(self, device: Any, room: Callable[[str, int], Buffer]) -> None:
        """room(name, bytes): scratch memory."""
        there = has_wgmma(device.arch)
        sums = LeftSums(device, device.sm_count)
        self._product = MulMatWgmma(device, device.sm_count, sums) if there else None
        self._few = MulMatFew(device, device.sm_count, sums)
        self._pack, self._room = Pack(device), room
        self.allowed = True  # weights may be rounded to halves

    def _there(self) -> bool:
        return self._product is not None and self.allowed

    def takes(
        self, n_tokens: int, layout: Layout | None = None, n_rows: int = 0, k: int = 0
    ) -> bool:
        """Whether so many tokens are multiplied here with a matrix of k columns in tiles of this
        layout, and others beside it; None: with any.
        """
        few = layout is not None and faster(layout, n_rows, k, n_tokens)
        return self._there() and (few or n_tokens >= FROM_TOKENS)

    @property
    def turns_heads(self) -> bool:
        """Whether products of many tokens can rotate q and k, and write to pages."""
        return self._there()

    def hands_on(self, n_tokens: int, tiles: list[TiledMatrix] | None = None) -> bool:
        """Whether products of so many tokens with these tiles hand norms on to each other; None:
        with some.
        """
        if not self._there() or not FEW_FROM_TOKENS <= n_tokens <= MOST_TOKENS:
            return False
        few = (self._is_few(w, n_tokens) and w.n_rows % UNIT == 0 for w in tiles or ())
        return n_tokens <= HANDED_TOKENS or all(few)

    def handed_part(self, w: TiledMatrix, n_tokens: int) -> int:
        """Columns whose squares a product that hands on adds up."""
        return ROWS if self._is_few(w, n_tokens) else ROW_BLOCK

    def order(self, layouts: list[Layout | None], n_rows: int, k: int, n_tokens: int) -> int:
        """In which order x[n_tokens, k] should come for weights of these layouts, the first with
        so many rows; None has no tiles.
        """
        sizes = n_rows, k
        orders = {order_of(w) if w and self.takes(n_tokens, w, *sizes) else PLAIN for w in layouts}
        return orders.pop() if len(orders) == 1 else PLAIN

    def _is_few(self, w: TiledMatrix, n_tokens: int) -> bool:
        few = faster(w.layout, w.n_rows, w.k, n_tokens)
        return few and self._few.fit(w, n_tokens) is not None

    def multiply(
        self,
        x: Array,
        tiles: list[TiledMatrix],
        outs: list[Array],
        epilogue: Epilogue,
        activation: str,
        just_made: bool = False,
        handed: Handed | None = None,
        turning: Turning | None = None,
    ) -> None:
        """outs[i] = epilogue(x tiles[i]^T) for tiles of one layout; see Products.multiply.

        just_made: by a kernel before, so that they must not be read ahead of its end.
        """
        assert self._product is not None
        n, order = outs[0].shape[0], outs[0].order
        arguments = tiles, self._packed(x, n, order_of(tiles[0].layout)), [o.data for o in outs], n
        options: dict[str, Any] = {"epilogue": epilogue, "activation": activation, "order": order}
        options |= {"late": x.late, "handed": handed, "pdl": not just_made}
        fills = epilogue != "GLU" or order == PLAIN or tiles[0].n_rows % UNIT == 0
        if fills and self._is_few(tiles[0], n):
            self._few.launch(*arguments, **options)
        else:
            self._product.launch(*arguments, **options, turning=turning)

    def _packed(self, x: Array, n_tokens: int, order: int) -> Memory:
        if x.order == order:
            return x.data
        if x.order != PLAIN:
            raise RuntimeError("activations were packed for tiles of another kind")
        k = x.shape[-1]
        packed = self._room("packed", packed_bytes(n_tokens, k))
        self._pack.launch(x.data, packed, n_tokens, k, order)
        return packed


def faster(layout: Layout, n_rows: int, k: int, n_tokens: int) -> bool:
    """Whether MulMatFew is faster than others, where there is room for x (SCHEDULES.md)."""
    few = FEW_FROM_TOKENS <= n_tokens <= FEW_TOKENS
    large = n_tokens > PAIR or min(n_rows, k) >= PAIR_SIZE
    return few and large and layout.bits >= 8 and k >= FEW_COLUMNS and k % UNIT == 0
