"""Launches cuda/w8a8/w8a8_wgmma.cu: tiles of 8 bits times 8-bit activations, on Hopper.

How output is dealt out is schedule.py's, when this product is made is ops' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...device.base import Device, Kernel
from ..address import Address
from ..attention.rope_kv import Turning, give_turning
from ..gemm.gemm import Epilogue
from ..gemm.hopper import THREADS, TILE_ROWS, LeftSums, dealt
from ..gemm.tile_scheduler import Cost, Cut, Stages, Tiles, fastest
from ..layout.tile import TiledMatrix
from .quantize_rows import STEP, VALUES, Kind, QuantizedRows
from .w8a8_prefill import w8a8_product

COSTS = {
    16: Cost(step=0.29, output=1.1, to_all=4.9, to_each=0.7),
    32: Cost(step=0.34, output=2.1, to_all=4.3, to_each=0.5),
    64: Cost(step=0.35, output=2.3, to_all=6.6, to_each=0.6),
    128: Cost(step=0.42, output=4.7, to_all=12.1, to_each=2.3),
    256: Cost(step=0.68, output=7.7, to_all=22.7, to_each=3.1),
}
# A large ring is better than two blocks. 8 tokens are w8a8_decode.py's.
TILES: dict[Kind, Tiles] = {
    "int8": Tiles(COSTS, alone=True, halved=True),
    "e4m3": Tiles({t: cost for t, cost in COSTS.items() if t < 256}, alone=True, halved=True),
}


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
        cut: Cut | None = None,
        turning: Turning | None = None,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x weights[i]^T, by both scales.

        STORE: floats. ADD: float out += y, for one weight. GLU: of two weights, one half out =
        activation(y0) * y1. QKV, with `turning`, as in MulMatWgmma.launch. All weights have one
        layout, of codes of x's kind.
        """
        product = w8a8_product(weights, x, outs, epilogue, None, activation, 0.0)
        give_turning(product, weights, epilogue, turning)
        row_blocks = -(-product.n_tiles // (TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS))
        stages = Stages(product.n_chunk, STEP, 8.0)
        cut = cut or fastest(TILES[x.kind], row_blocks, x.n_tokens, stages, self.multiprocessors)
        cut = replace(cut, alone=True)  # as the kernel's shared memory has it
        schedule = cut.deal(row_blocks, x.n_tokens, product.n_chunk, self.multiprocessors)
        product.dealt = dealt(schedule, product.n_chunk)
        if cut.split:
            self._sums.give(product)
        kernel = self._kernel(x.kind, cut.tokens, epilogue)
        kernel.launch(schedule.blocks, THREADS, (product,), smem=cut.shared, pdl=True)

    def _kernel(self, kind: Kind, tokens: int, epilogue: Epilogue) -> Kernel:
        key = kind, tokens, epilogue
        if key not in self._kernels:
            name = f"w8a8_wgmma<{VALUES[kind]}, {tokens}, {epilogue}>"
            self._kernels[key] = self.device.kernel("w8a8/w8a8_wgmma.cu", name)
        return self._kernels[key]
