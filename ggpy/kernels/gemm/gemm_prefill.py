"""Launches cuda/gemm/gemm_prefill.cu: tiled matrices times the activations of many tokens, for prompts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...device.base import Device, Kernel
from ..address import Address, address
from ..layout.tile import TiledMatrix
from .gemm import Epilogue, Matrices

THREADS = 256
TOKENS = 128  # of a block
TILE_ROWS = 8  # of a block
STAGE_BYTES = TOKENS * (64 + 32) * 2  # 64 columns of x, padded
STAGES = (3, 2)  # as many as fit: two in the 64 KB of Turing


class _Product(Matrices):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("soft_cap", ctypes.c_float),
    )


class MulMatQ:
    """y = x W^T for matrices of one layout. Instances are compiled as they are asked for."""

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
        """Enqueue outs[i][n_tokens, rows of weights[i]] = half x[n_tokens, k] weights[i]^T.

        Epilogues as in MulMatTile.launch. All weights have one layout and one k.
        """
        product = _Product(x=address(x), residual=address(residual), soft_cap=soft_cap)
        product.take(weights, outs, n_tokens, epilogue, activation)
        rows = TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS
        grid = -(-n_tokens // TOKENS), -(-product.n_tiles // rows)
        kernel = self._kernel(weights[0].layout.type_name, epilogue)
        shared = self.stages * STAGE_BYTES
        kernel.launch(grid, THREADS, (product,), smem=shared, pdl=True)

    def _kernel(self, layout: str, epilogue: Epilogue) -> Kernel:
        key = layout, epilogue
        if key not in self._kernels:
            name = f"gemm_prefill<{layout}, {epilogue}>"
            defines = {"X_STAGES": self.stages}
            self._kernels[key] = self.device.kernel("gemm/gemm_prefill.cu", name, defines=defines)
        return self._kernels[key]
