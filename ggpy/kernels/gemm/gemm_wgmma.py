"""Launches cuda/gemm/gemm_wgmma.cu: tiled matrices times packed activations, on Hopper.

How output is dealt out is schedule.py's, when this product is made is ops' business.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...device.base import Device, Kernel
from ..address import Address, address
from ..attention.rope_kv import Turning, TurningParameters, give_turning
from ..layout.pack import PLAIN, STEP, steps_of
from ..layout.tile import ROWS, Layout, TiledMatrix
from ..norm.deferred_norm import Handed, HandedParameters
from .gemm import Epilogue, Matrices
from .hopper import THREADS, TILE_ROWS, Dealt, LeftSums, dealt
from .tile_scheduler import Cost, Cut, Stages, Tiles, fastest

HANDED_TOKENS = 8  # of a tile whose norm may be handed on
EARLY = 52 << 10  # bytes of weights that a block asks for before x is there
TILES = Tiles(
    {
        32: Cost(step=0.57, output=0.0, to_all=5.5, to_each=0.26),
        64: Cost(step=1.04, output=0.0, to_all=10.9, to_each=0.35),
        128: Cost(step=0.87, output=0.0, to_all=12.2, to_each=1.52),
        256: Cost(step=1.44, output=0.0, to_all=18.3, to_each=3.05),
    },
    few=(8, 16),
    memory=0.109,
    pairs=True,
)


class _Product(Matrices):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("dealt", Dealt),
        ("handed", HandedParameters),
        ("order", ctypes.c_int),
        ("early", ctypes.c_int),
        ("turning", TurningParameters),
    )


class MulMatWgmma:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

    def __init__(self, device: Device, multiprocessors: int, sums: LeftSums | None = None) -> None:
        """sums: memory that other products leave sums in as well; by default it has its own."""
        self.device, self.multiprocessors = device, multiprocessors
        self._kernels: dict[tuple, Kernel] = {}
        self._sums = sums or LeftSums(device, multiprocessors)

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: Address,
        outs: Sequence[Address],
        n_tokens: int,
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        order: int = PLAIN,
        cut: Cut | None = None,
        late: bool = False,
        handed: Handed | None = None,
        turning: Turning | None = None,
        pdl: bool = True,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T.

        x is packed in the order of the weights' layout. STORE: floats. ADD: float out += y, for one
        weight. GLU: of two weights, one half out = activation(y0) * y1, in rows or packed. QKV: of
        q, k and v, rotated as `turning` says, halves q[T, H * E] and a layer's pages of keys and of
        values (RopeKv.product_turns). All weights have one layout and one k. late: x is made by few
        blocks, beside which others of this kernel wait for it. handed: a norm of HANDED_TOKENS at
        most, of what ADD leaves, or that of x. pdl: weights are read before the kernel before has
        ended.
        """
        first, glu = weights[0], epilogue == "GLU"
        product = _Product(x=address(x), order=order)
        product.take(weights, outs, n_tokens, epilogue, activation)
        rows = TILE_ROWS // 2 if glu else TILE_ROWS
        row_blocks = -(-product.n_tiles // rows)
        if order != PLAIN:  # the zeros behind the last column, too
            row_blocks = steps_of(first.n_rows)
        stages = stages_of(first.layout, first.k)
        cut = cut or fastest(TILES, row_blocks, n_tokens, stages, self.multiprocessors)
        schedule = cut.deal(row_blocks, n_tokens, stages.count, self.multiprocessors)
        product.dealt = dealt(schedule, stages.count)
        give_turning(product, weights, epilogue, turning)
        product.early = 1 if late else early_stages(first.layout)
        if handed is not None:
            if cut.tokens != HANDED_TOKENS or n_tokens > cut.tokens:
                raise ValueError(f"a norm of {n_tokens} tokens is not handed on")
            product.handed = handed.parameters()
        if cut.split:
            self._sums.give(product)
        cluster = schedule.sharers
        kernel = self._kernel(first.layout, cut.tokens, epilogue, cluster)
        args = (product,)
        kernel.launch(schedule.blocks, THREADS, args, smem=cut.shared, cluster=cluster, pdl=pdl)

    def _kernel(self, layout: Layout, tokens: int, epilogue: Epilogue, sharers: int) -> Kernel:
        key = layout, tokens, epilogue, sharers
        if key not in self._kernels:
            name = instance(layout, tokens, epilogue, sharers)
            self._kernels[key] = self.device.kernel("gemm/gemm_wgmma.cu", name)
        return self._kernels[key]


def stage_columns(layout: Layout) -> int:
    """Columns of a stage: a chunk, or two of 64."""
    return max(layout.chunk_k, 2 * STEP)


def stages_of(layout: Layout, k: int) -> Stages:
    """The stages of a row."""
    columns = stage_columns(layout)
    bits = 8 * layout.used_bytes / (ROWS * layout.chunk_k)
    return Stages(-(-steps_of(k) * STEP // columns), columns, bits)


def instance(layout: Layout, tokens: int, epilogue: Epilogue, sharers: int = 1) -> str:
    """The name of a kernel."""
    return f"gemm_wgmma<{layout.type_name}, {tokens}, {epilogue}, {sharers}>"


def early_stages(layout: Layout) -> int:
    """Stages of weights that are asked for before x is there: more would make x late."""
    chunks = 2 if layout.chunk_k == STEP else 1
    return max(1, EARLY // (chunks * TILE_ROWS * layout.chunk_bytes))
