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
CTAS = (3, 2)  # that an SM holds, in order of preference
ROUND_CHUNKS = 8  # that a warp multiplies, at least: it takes tile rows up to that


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


def shared_bytes(layout: Layout, k: int) -> int:
    """Bytes of dynamic shared memory of a CTA."""
    columns = layout.chunks(k) * layout.chunk_k
    narrow = layout.group == 16 or layout.is_float
    x = ROWS * (2 * columns + (32 if narrow else 64))
    sums = 4 * ROWS * columns // layout.group if layout.is_scaled else 0
    return WARPS * STAGES * layout.chunk_bytes + x + sums


class ExpertRows:
    """The grouped GEMM of few rows. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def tile_rows(self, weights: Sequence[TiledMatrix], n_pairs: int, n_expert: int) -> int:
        """Rows of a work tile for so many pairs; 0: another kernel is faster, or only another one
        fits.
        """
        fits = all(self._ctas(w.layout, w.k) for w in weights)
        return ROWS if fits and n_pairs <= MOST_PAIRS * n_expert else 0

    def _ctas(self, layout: Layout, k: int) -> int:
        """CTAs that an SM holds; 0: one at most."""
        needed = shared_bytes(layout, k) + STATIC_SHARED
        return next((n for n in CTAS if n * needed <= self.device.shared_bytes), 0)

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
        width, n_tiles = len(weights), args.n_tiles
        args.rounds = min(-(-ROUND_CHUNKS // (width * args.n_chunk)), -(-n_tiles // WARPS))
        grid = work_tiles(n_pairs, n_expert, ROWS), -(-n_tiles // (WARPS * args.rounds))
        kernel = self._kernel(layout.type_name, epilogue, self._ctas(layout, first.k))
        kernel.launch(grid, WARPS * 32, (args,), smem=shared_bytes(layout, first.k), pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue, ctas: int) -> Kernel:
        key = layout, epilogue, ctas
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_rows.cu",
                f"expert_rows<{layout}, {epilogue}>",
                defines={"WARPS": WARPS, "STAGES": STAGES, "NORM_PIECES": 1, "CTAS": ctas},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
