"""Launches cuda/moe/expert_rows.cu: a few sorted rows an expert times their experts, for steps in
which sequences decode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import STATIC_SHARED, Epilogue, GemmArgs
from ..layout.tile import Layout, TiledMatrix
from ..struct_asserts import struct_asserts
from .combine import ACTIVATIONS
from .sort import SortedPairs, work_tiles

# Rows of a work tile, each with the most pairs an expert on average. By whether codes index a
# table, which takes long: 16 rows look up a code once, but use more registers and shared memory.
TILES = {False: ((8, 8),), True: ((8, 6), (16, 13))}
STAGES = 2  # of a warp's pipeline
ROUND_CHUNKS = 8  # that a warp multiplies, at least, if there are CTAs for all SMs


@dataclass(frozen=True)
class Shape:
    """Tile rows that a warp multiplies at once, warps of a CTA, CTAs that an SM holds."""

    tiles: int
    warps: int
    ctas: int


# By the rows of a work tile, in order of preference. Two tile rows read x half as often; more warps
# unpack slow codes sooner.
SHAPES = {
    8: (Shape(1, 8, 3), Shape(2, 8, 2), Shape(1, 8, 2)),
    16: (Shape(1, 8, 2), Shape(2, 12, 1), Shape(1, 16, 1)),
}
FAST_SHAPES = {  # of layouts that unpack fast
    8: (Shape(2, 8, 2), Shape(1, 8, 2)),
    16: (Shape(2, 12, 1), Shape(1, 8, 2)),
}


class ExpertRowsArgs(GemmArgs):
    """struct ExpertRowsArgs of cuda/moe/expert_rows.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        *((name, ctypes.c_uint64) for name in ("x", "work", "pair_of")),
        ("bias", ctypes.c_uint64 * 2),
        ("expert_bytes", ctypes.c_uint64),
        ("pairs_per_x", ctypes.c_int),
        ("sorted_before", ctypes.c_int),
        ("rounds", ctypes.c_int),
    )


ASSERTS = struct_asserts(ExpertRowsArgs)


def shared_bytes(layout: Layout, k: int, rows: int, shape: Shape) -> int:
    """Bytes of dynamic shared memory of a CTA. rows: of a work tile."""
    columns = layout.chunks(k) * layout.chunk_k
    narrow = layout.group == 16 or layout.is_float
    x = rows * (2 * columns + (32 if narrow else 64))
    sums = 4 * rows * layout.group_sums * columns // layout.group
    return shape.warps * STAGES * shape.tiles * layout.chunk_bytes + x + sums


def unpacks_fast(layout: Layout) -> bool:
    """Whether codes lie in one plane and become f16 without a table."""
    return layout.bits in (4, 8, 16) and (not layout.is_table or layout.is_e2m1)


def shapes(layout: Layout, rows: int) -> Sequence[Shape]:
    """Shapes for a work tile of so many rows, in order of preference."""
    return (FAST_SHAPES if unpacks_fast(layout) else SHAPES)[rows]


class ExpertRows:
    """The grouped GEMM of few rows. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def tile_rows(self, weights: Sequence[TiledMatrix], n_pairs: int, n_expert: int) -> int:
        """Rows of a work tile for so many pairs; 0: another kernel is faster, or only another one
        fits.
        """
        is_table = any(w.layout.is_table for w in weights)
        for rows, most in TILES[is_table]:
            if n_pairs <= most * n_expert and all(self.shape(w, rows) for w in weights):
                return rows
        return 0

    def shape(self, w: TiledMatrix, rows: int, is_glu: bool = False) -> Shape | None:
        """The first of the shapes that fits; None: none does. rows: of a work tile."""
        for shape in shapes(w.layout, rows):
            needed = shared_bytes(w.layout, w.k, rows, shape) + STATIC_SHARED
            pairs_up = shape.tiles == 1 or is_glu or w.tile_rows % shape.tiles == 0
            if pairs_up and shape.ctas * needed <= self.device.shared_bytes:
                return shape
        return None

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        order: SortedPairs,
        x: Address,
        out: Address,
        n_pairs: int,
        n_expert: int,
        *,
        n_used: int = 0,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
        biases: Sequence[Address | None] = (),
        sorted_before: bool = False,
    ) -> None:
        """Enqueue out[row] = x[row] weights[expert of the row]^T; x is f16 of k columns.

        weights: the first of the experts, which follow each other: one, of which out is f32, or
        GLU, gate and up, whose `biases` are f32 [n_expert, rows] and of which out is f16. order: as
        sort.SortPairs makes it. n_used: x has a row for so many pairs, in the order of tokens; 0:
        the rows that are multiplied. sorted_before: all kernels before the previous one have ended,
        and `order` is theirs, as after a launch with GLU or Combine.glu: weights are read before
        the previous one ends.
        """
        first, layout = weights[0], weights[0].layout
        args = ExpertRowsArgs(x=address(x), work=address(order.work), pairs_per_x=n_used)
        args.pair_of = address(order.pair_of) if n_used else 0
        args.set_matrices(weights, [out], n_pairs, epilogue, "silu")
        args.sorted_before = sorted_before
        args.activation = ACTIVATIONS[activation]
        args.expert_bytes = layout.nbytes(first.n_rows, first.k)
        for i, bias in enumerate(biases):
            args.bias[i] = address(bias)
        is_glu = epilogue == "GLU"
        rows = order.tile_rows
        shape = self.shape(first, rows, is_glu)
        if shape is None:
            raise ValueError(f"rows of {first.k} columns do not fit into shared memory")
        n_rounds = args.n_tiles if is_glu else args.n_tiles // shape.tiles
        chunks = args.n_chunk * (2 if is_glu else shape.tiles)  # of a round
        tiles, of_cta = work_tiles(n_pairs, n_expert, rows), -(-n_rounds // shape.warps)
        args.rounds = self._rounds_of_warp(tiles, of_cta, chunks, shape)
        grid = tiles, -(-of_cta // args.rounds)
        kernel = self._kernel(layout.type_name, epilogue, rows, shape)
        shared = shared_bytes(layout, first.k, rows, shape)
        kernel.launch(grid, shape.warps * 32, (args,), smem=shared, pdl=True)

    def _rounds_of_warp(self, n_work: int, of_cta: int, chunks: int, shape: Shape) -> int:
        """Rounds that each warp multiplies: enough for ROUND_CHUNKS, if CTAs fill all SMs then.

        of_cta: rounds of a warp if a work tile had one CTA. chunks: of a round.
        """
        filling = -(-self.device.sm_count * shape.ctas // n_work)  # CTAs of a work tile
        return min(-(-ROUND_CHUNKS // chunks), max(1, of_cta // filling))

    def _kernel(self, layout: str, epilogue: Epilogue, rows: int, shape: Shape) -> Kernel:
        key = layout, epilogue, rows, shape
        if key not in self._kernels:
            of_shape = {"TILES": shape.tiles, "WARPS": shape.warps, "CTAS": shape.ctas}
            self._kernels[key] = self.device.kernel(
                "moe/expert_rows.cu",
                f"expert_rows<{layout}, {epilogue}>",
                defines={"ROWS": rows, "STAGES": STAGES, "NORM_PIECES": 1, **of_shape},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
