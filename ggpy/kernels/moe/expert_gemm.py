"""Launches cuda/moe/expert_gemm.cu: sorted rows times their experts, for prefill."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import Epilogue
from ..gemm.gemm_prefill import STAGE_BYTES, STAGES, THREADS, TILE_ROWS, GemmPrefillArgs
from ..layout.tile import TiledMatrix
from ..struct_asserts import struct_asserts
from .sort import work_tiles


class ExpertGemmArgs(GemmPrefillArgs):
    """struct ExpertGemmArgs of cuda/moe/expert_gemm.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("work", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_uint64),
    )


ASSERTS = struct_asserts(ExpertGemmArgs)


class ExpertGemm:
    """The grouped GEMM. Instances are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stages = next(n for n in STAGES if n * STAGE_BYTES <= device.shared_bytes)
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        work: Address,
        x: Address,
        outs: Sequence[Address],
        n_pairs: int,
        n_expert: int,
        *,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
    ) -> None:
        """Enqueue outs[i][row] = x[row] weights[i][expert of the row]^T; x is f16 [n_pairs, k].

        weights, epilogues: as in ExpertGemv.launch. work: as sort.SortPairs makes it.
        """
        first = weights[0]
        args = ExpertGemmArgs(x=address(x), work=address(work))
        args.set_matrices(weights, outs, n_pairs, epilogue, activation)
        args.expert_bytes = first.layout.nbytes(first.n_rows, first.k)
        rows = TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS
        grid = work_tiles(n_pairs, n_expert), -(-args.n_tiles // rows)
        kernel = self._kernel(first.layout.type_name, epilogue)
        kernel.launch(grid, THREADS, (args,), smem=self.stages * STAGE_BYTES, pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue) -> Kernel:
        key = layout, epilogue
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_gemm.cu",
                f"expert_gemm<{layout}, {epilogue}>",
                defines={"X_STAGES": self.stages},
                extra_source=ASSERTS,
            )
        return self._kernels[key]
