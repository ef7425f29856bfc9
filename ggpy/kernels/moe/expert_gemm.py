"""Launches cuda/moe/expert_gemm.cu: sorted rows times their experts.

How many rows a work tile has is chosen by the pairs that an expert gets on average.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import Epilogue
from ..gemm.gemm_prefill import X_BYTES, GemmPrefillArgs
from ..layout.tile import TiledMatrix
from ..struct_asserts import struct_asserts
from .sort import SortedPairs, work_tiles

# Rows of a work tile, each with the most pairs an expert on average: twice as many rows hold what
# more than 99 of 100 experts get of evenly drawn pairs. A tile of 64 holds what its registers can.
TILES = ((16, 8), (32, 18), (64, None))
CHUNK_STEPS = 4  # of 64 columns, in the longest chunks
STATIC_SHARED = 1 << 10


class ExpertGemmArgs(GemmPrefillArgs):
    """struct ExpertGemmArgs of cuda/moe/expert_gemm.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("work", ctypes.c_uint64),
        ("pair_of", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_uint64),
        ("pairs_per_x", ctypes.c_int),
    )


ASSERTS = struct_asserts(ExpertGemmArgs)


def x_bytes(tile_rows: int, steps: int) -> int:
    """Bytes of shared memory for two chunks, each of so many steps of 64 columns, of x."""
    return 2 * steps * tile_rows * X_BYTES


class ExpertGemm:
    """The grouped GEMM. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def tile_rows(self, n_pairs: int, n_expert: int) -> int:
        """Rows of a work tile for so many pairs."""
        limit = self.device.shared_bytes - STATIC_SHARED
        fits = [(n, most) for n, most in TILES if x_bytes(n, CHUNK_STEPS) <= limit]
        found = (n for n, most in fits if most is None or n_pairs <= most * n_expert)
        return next(found, fits[-1][0])

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        order: SortedPairs,
        x: Address,
        outs: Sequence[Address],
        n_pairs: int,
        n_expert: int,
        *,
        n_used: int = 0,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
    ) -> None:
        """Enqueue outs[i][row] = x[row] weights[i][expert of the row]^T; x is f16 of k columns.

        weights, epilogues: as in ExpertGemv.launch. order: as sort.SortPairs makes it. n_used: x
        has a row for so many pairs, in the order of tokens; 0: the rows that are multiplied.
        """
        first, tile = weights[0], order.tile_rows
        args = ExpertGemmArgs(x=address(x), work=address(order.work), pairs_per_x=n_used)
        args.pair_of = address(order.pair_of) if n_used else 0
        args.set_matrices(weights, outs, n_pairs, epilogue, activation)
        args.expert_bytes = first.layout.nbytes(first.n_rows, first.k)
        warps = 4 if tile <= 32 else 8
        rows = warps if epilogue == "GLU" else 2 * warps
        grid = work_tiles(n_pairs, n_expert, tile), -(-args.n_tiles // rows)
        shared = x_bytes(tile, first.layout.chunk_k // 64)
        kernel = self._kernel(first.layout.type_name, epilogue, tile)
        kernel.launch(grid, warps * 32, (args,), smem=shared, pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue, tile: int) -> Kernel:
        key = layout, epilogue, tile
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_gemm.cu",
                f"expert_gemm<{layout}, {epilogue}>",
                defines={"TILE_TOKENS": tile},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
