"""Launches cuda/mul_mat_w8a8_wgmma.cu: tiles of 8 bits times 8-bit activations, on Hopper.

Knows how output is cut into tiles, and which cut is the fastest for a shape; when this product is
made is ops' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device.base import Device, Kernel
from .address import Address
from .hopper import THREADS, TILE_ROWS, LeftSums, dealt
from .mul_mat_w8a8 import w8a8_product
from .product import Epilogue
from .quantize_rows import VALUES, Kind, QuantizedRows
from .schedule import TOKENS, Cut
from .tile import TiledMatrix


@dataclass(frozen=True)
class W8A8Cut(Cut):
    """How a product of codes of a kind is dealt out."""

    kind: Kind = "int8"

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that a multiprocessor runs at the same time: a large ring is better than two."""
        return 1


def tokens_of(kind: Kind) -> tuple[int, ...]:
    """Tokens of a block, an instance each."""
    return TOKENS[1:] if kind == "int8" else TOKENS[1:-1]  # 8 are mul_mat_w8a8_few.py's


class MulMatW8A8Wgmma:
    """y = x W^T for 8-bit numbers. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, multiprocessors: int) -> None:
        self.device, self.multiprocessors = device, multiprocessors
        self._kernels: dict[tuple, Kernel] = {}
        self._sums = LeftSums(device, multiprocessors)

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: QuantizedRows,
        outs: Sequence[Address],
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        cut: W8A8Cut | None = None,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x weights[i]^T, by both scales.

        STORE: floats. ADD: float out += y, for one weight. GLU: of two weights, one half out =
        activation(y0) * y1. All weights have one layout, of codes of x's kind.
        """
        product = w8a8_product(weights, x, outs, epilogue, None, activation, 0.0)
        row_blocks = -(-product.n_tiles // (TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS))
        cut = cut or self.cut(x.kind, row_blocks, x.n_tokens, product.n_chunk)
        schedule = cut.deal(row_blocks, x.n_tokens, product.n_chunk, self.multiprocessors)
        product.dealt = dealt(schedule, product.n_chunk)
        if cut.split:
            self._sums.give(product)
        kernel = self._kernel(x.kind, cut.tokens, epilogue)
        kernel.launch(schedule.blocks, THREADS, (product,), smem=cut.shared, pdl=True)

    def cut(self, kind: Kind, row_blocks: int, n_tokens: int, stages: int) -> W8A8Cut:
        """The fastest cut of row_blocks x n_tokens outputs with so many stages of K each."""
        choices = tokens_of(kind)
        if n_tokens <= TOKENS[-2]:
            return W8A8Cut(next(t for t in choices if t >= n_tokens), True, kind)
        cuts = [W8A8Cut(t, split, kind) for t in choices if t >= 128 for split in (False, True)]
        return min(cuts, key=lambda cut: self._cost(cut, row_blocks, n_tokens, stages))

    def _cost(self, cut: W8A8Cut, row_blocks: int, n_tokens: int, stages: int) -> float:
        """Microseconds of a launch, fitted to an H200: of stages, of writing outputs, and of
        handing sums over.
        """
        stage, writing, handing_over = (0.45, 2.2, 12) if cut.tokens < TOKENS[-1] else (0.71, 5, 20)
        if cut.kind == "e4m3":
            stage += 0.05
        tile = stages * stage + writing
        tiles = row_blocks * -(-n_tokens // cut.tokens)
        if cut.split:
            # Whole tiles share what they read better: nearly as good is not good enough.
            return 1.05 * (tiles * tile / self.multiprocessors + handing_over)
        return -(-tiles // self.multiprocessors) * tile

    def _kernel(self, kind: Kind, tokens: int, epilogue: Epilogue) -> Kernel:
        key = kind, tokens, epilogue
        if key not in self._kernels:
            name = f"mul_mat_w8a8_wgmma<{VALUES[kind]}, {tokens}, {epilogue}>"
            self._kernels[key] = self.device.kernel("mul_mat_w8a8_wgmma.cu", name)
        return self._kernels[key]
