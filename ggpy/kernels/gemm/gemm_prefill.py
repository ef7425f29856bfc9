"""Launches cuda/gemm/gemm_prefill.cu: the prefill GEMM for any GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.tile import TiledMatrix
from ..struct_asserts import struct_asserts
from .gemm import Epilogue, GemmArgs

THREADS = 256
TOKENS = 128  # tokens of a CTA
TILE_ROWS = 8  # tile rows of a CTA
X_BYTES = (64 + 32) * 2  # of a token in a stage: 64 columns of f16 x, and 32 of padding
STAGE_BYTES = TOKENS * X_BYTES
STAGES = (3, 2)  # as many as fit: two in the 64 KB of Turing


class GemmPrefillArgs(GemmArgs):
    """struct GemmPrefillArgs of cuda/gemm/gemm_prefill.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("soft_cap", ctypes.c_float),
    )


ASSERTS = struct_asserts(GemmPrefillArgs)


class GemmPrefill:
    """The prefill GEMM y = x W^T. Instances of the kernel are compiled at their first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stages = next(n for n in STAGES if n * STAGE_BYTES <= device.shared_bytes)
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: Address,
        outs: Sequence[Address],
        n_tokens: int,
        *,
        epilogue: Epilogue = "STORE",
        residual: Address | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x[n_tokens, k] weights[i]^T; x is f16.

        Epilogues STORE, ADD and GLU as in GemmDecode.launch. All weights have the same layout and
        k.
        """
        args = GemmPrefillArgs(x=address(x), residual=address(residual), soft_cap=soft_cap)
        args.set_matrices(weights, outs, n_tokens, epilogue, activation)
        rows = TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS
        grid = -(-n_tokens // TOKENS), -(-args.n_tiles // rows)
        kernel = self._kernel(weights[0].layout.type_name, epilogue)
        shared = self.stages * STAGE_BYTES
        kernel.launch(grid, THREADS, (args,), smem=shared, pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue) -> Kernel:
        key = layout, epilogue
        if key not in self._kernels:
            name = f"gemm_prefill<{layout}, {epilogue}>"
            defines = {"X_STAGES": self.stages}
            self._kernels[key] = self.device.kernel(
                "gemm/gemm_prefill.cu", name, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]
