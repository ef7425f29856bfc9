"""Launches cuda/moe/expert_gemv.cu: one token times the experts that it chose, for decode steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

from ...device.base import Device, Kernel
from ..address import Address, address
from ..gemm.gemm import Epilogue
from ..gemm.gemm_decode import GemmDecode, GemmDecodeArgs, GemmDecodeConfig, padded_k
from ..layout.tile import TiledMatrix
from ..struct_asserts import struct_asserts


class ExpertGemvArgs(GemmDecodeArgs):
    """struct ExpertGemvArgs of cuda/moe/expert_gemv.cu."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("ids", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_uint64),
        ("pairs_per_x", ctypes.c_int),
        ("ids_ready", ctypes.c_int),
    )


ASSERTS = struct_asserts(ExpertGemvArgs)


class ExpertGemv:
    """The decode GEMM of one token, for each (token, expert) pair."""

    def __init__(self, device: Device, decode: GemmDecode) -> None:
        """decode: knows how much of x and of the weights fits into shared memory."""
        self.device, self._decode = device, decode
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        ids: Address,
        x: Address,
        outs: Sequence[Address],
        n_pairs: int,
        n_used: int,
        *,
        per_token: bool,
        ids_ready: bool = False,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
    ) -> None:
        """Enqueue outs[i][pair] = x[row] weights[i][ids[pair]]^T for the pairs of a step.

        weights: the first of the experts, which follow each other; all have one shape and layout.
        x: f16 rows of k columns. per_token: row is pair / n_used, else the pair itself. Epilogues:
        STORE, f32, or GLU, one f16 output of gate and up. ids_ready: the kernel before this one is
        an ExpertGemv without ids_ready or Combine.glu: both let the next kernel start only when all
        before them have ended, so ids may be read at once.
        """
        first = weights[0]
        args = ExpertGemvArgs(x=address(x), ids=address(ids))
        args.set_matrices(weights, outs, 1, epilogue, activation)
        args.expert_bytes = first.layout.nbytes(first.n_rows, first.k)
        args.pairs_per_x, args.ids_ready = n_used if per_token else 1, ids_ready
        # not by the number of pairs: the order of sums would change
        ctas = min(args.n_tiles, max(1, self._decode.limits.n_sms // n_used))
        tile_rows = args.split(ctas) * (2 if epilogue == "GLU" else 1)
        config = self._decode.config_of_one(first, tile_rows)
        args.slab = config.slab
        kernel = self._kernel(first, config, epilogue)
        grid = ctas, n_pairs
        kernel.launch(grid, config.warps * 32, (args,), smem=config.shared, pdl=True)

    def _kernel(self, w: TiledMatrix, config: GemmDecodeConfig, epilogue: Epilogue) -> Kernel:
        whole = str(config.slab >= padded_k(w)).lower()
        instance = f"expert_gemv<{w.layout.type_name}, {epilogue}, {whole}>"
        defines = {"WARPS": config.warps, "STAGES": config.stages, "NORM_PIECES": 1}
        key = instance, *defines.values()
        if key not in self._kernels:
            self._kernels[key] = self.device.kernel(
                "moe/expert_gemv.cu", instance, defines=defines, extra_source=ASSERTS
            )
        return self._kernels[key]
