"""Launches cuda/moe/expert_rows.cu: a few sorted rows an expert times their experts, for steps in
which sequences decode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import STATIC_SHARED, Epilogue, GemmArgs
from ..layout.tile import Layout, TiledMatrix
from ..struct_asserts import struct_asserts
from .combine import ACTIVATIONS
from .sort import SortedPairs, work_tiles

ROWS = 8  # of a work tile
MOST_PAIRS = 5  # of an expert, on average: 93 of 100 experts then have one work tile
WARPS = 8
STAGES = 2  # of a warp's pipeline
# By unpacks_fast: (tile rows that a warp multiplies at once, CTAs that an SM holds), in order of
# preference. Two tile rows read x half as often; more warps unpack slow codes sooner.
SHAPES = {True: ((2, 2), (1, 2)), False: ((1, 3), (2, 2), (1, 2))}
ROUND_CHUNKS = 8  # that a warp multiplies, at least: it takes rounds up to that


class ExpertRowsArgs(GemmArgs):
    """struct ExpertRowsArgs of cuda/moe/expert_rows.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        *((name, ctypes.c_uint64) for name in ("x", "work", "pair_of")),
        ("bias", ctypes.c_uint64 * 2),
        ("expert_bytes", ctypes.c_uint64),
        ("pairs_per_x", ctypes.c_int),
        ("rounds", ctypes.c_int),
    )


ASSERTS = struct_asserts(ExpertRowsArgs)


def shared_bytes(layout: Layout, k: int, tiles: int) -> int:
    """Bytes of dynamic shared memory of a CTA. tiles: tile rows that a warp multiplies together."""
    columns = layout.chunks(k) * layout.chunk_k
    narrow = layout.group == 16 or layout.is_float
    x = ROWS * (2 * columns + (32 if narrow else 64))
    sums = 4 * ROWS * columns // layout.group if layout.is_scaled else 0
    return WARPS * STAGES * tiles * layout.chunk_bytes + x + sums


def unpacks_fast(layout: Layout) -> bool:
    """Whether codes lie in one plane and index no table."""
    return layout.bits in (4, 8, 16) and not layout.is_table


class ExpertRows:
    """The grouped GEMM of few rows. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def tile_rows(self, weights: Sequence[TiledMatrix], n_pairs: int, n_expert: int) -> int:
        """Rows of a work tile for so many pairs; 0: another kernel is faster, or only another one
        fits.
        """
        fits = all(self.shape(w) for w in weights)
        return ROWS if fits and n_pairs <= MOST_PAIRS * n_expert else 0

    def shape(self, w: TiledMatrix, is_glu: bool = False) -> tuple[int, int] | None:
        """The first of SHAPES that fits; None: an SM holds one CTA at most."""
        for tiles, ctas in SHAPES[unpacks_fast(w.layout)]:
            needed = shared_bytes(w.layout, w.k, tiles) + STATIC_SHARED
            pairs_up = tiles == 1 or is_glu or w.tile_rows % tiles == 0
            if pairs_up and ctas * needed <= self.device.shared_bytes:
                return tiles, ctas
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
    ) -> None:
        """Enqueue out[row] = x[row] weights[expert of the row]^T; x is f16 of k columns.

        weights: the first of the experts, which follow each other: one, of which out is f32, or
        GLU, gate and up, whose `biases` are f32 [n_expert, rows] and of which out is f16. order: as
        sort.SortPairs makes it. n_used: x has a row for so many pairs, in the order of tokens; 0:
        the rows that are multiplied.
        """
        first, layout = weights[0], weights[0].layout
        args = ExpertRowsArgs(x=address(x), work=address(order.work), pairs_per_x=n_used)
        args.pair_of = address(order.pair_of) if n_used else 0
        args.set_matrices(weights, [out], n_pairs, epilogue, "silu")
        args.activation = ACTIVATIONS[activation]
        args.expert_bytes = layout.nbytes(first.n_rows, first.k)
        for i, bias in enumerate(biases):
            args.bias[i] = address(bias)
        is_glu = epilogue == "GLU"
        shape = self.shape(first, is_glu)
        if shape is None:
            raise ValueError(f"rows of {first.k} columns do not fit into shared memory")
        tiles, _ = shape
        n_rounds = args.n_tiles if is_glu else args.n_tiles // tiles
        chunks = args.n_chunk * (2 if is_glu else tiles)  # of a round
        args.rounds = min(-(-ROUND_CHUNKS // chunks), -(-n_rounds // WARPS))
        grid = work_tiles(n_pairs, n_expert, ROWS), -(-n_rounds // (WARPS * args.rounds))
        kernel = self._kernel(layout.type_name, epilogue, *shape)
        shared = shared_bytes(layout, first.k, tiles)
        kernel.launch(grid, WARPS * 32, (args,), smem=shared, pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue, tiles: int, ctas: int) -> Kernel:
        key = layout, epilogue, tiles, ctas
        if key not in self._kernels:
            defines = {"WARPS": WARPS, "STAGES": STAGES, "NORM_PIECES": 1}
            self._kernels[key] = self.device.kernel(
                "moe/expert_rows.cu",
                f"expert_rows<{layout}, {epilogue}>",
                defines=defines | {"TILES": tiles, "CTAS": ctas},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
