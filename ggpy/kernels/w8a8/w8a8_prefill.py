"""Launches cuda/w8a8/w8a8_prefill.cu: the prefill GEMM of 8-bit weights and 8-bit activations.

This module also has the parameters and the checks that all W8A8 GEMMs share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...device.base import Device, Kernel, capability
from ..address import Address, address
from ..attention.rope_kv import RopeEpilogueArgs
from ..gemm.gemm import Epilogue, GemmArgs
from ..gemm.hopper import TileSchedulerArgs
from ..layout.tile import TiledMatrix
from ..struct_asserts import struct_asserts
from .quantize_rows import STEP, VALUES, Kind, QuantizedRows

THREADS = 256
TOKENS = 128  # tokens per CTA
TILE_ROWS = 8  # tile rows per CTA
X_STAGES = 3
SHARED = X_STAGES * TOKENS * STEP  # 48 KB, which every GPU has
# The int32 sum of more columns may overflow or equal EMPTY (cuda/gemm/tile_scheduler.cuh).
MAX_K = 0x7F7F7F7F // (127 * 128)
CHUNK_BYTES = 16 * STEP


class W8A8Args(GemmArgs):
    """struct W8A8Args of cuda/w8a8/w8a8.cuh."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("x_scale", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("first_token", ctypes.c_int),
        ("end_token", ctypes.c_int),
        ("scheduler", TileSchedulerArgs),
        ("rope_epilogue", RopeEpilogueArgs),
        ("eps", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


ASSERTS = struct_asserts(W8A8Args)


def w8a8_args(
    weights: Sequence[TiledMatrix],
    x: QuantizedRows,
    outs: Sequence[Address],
    epilogue: Epilogue,
    residual: Address | None,
    activation: str,
    soft_cap: float,
) -> W8A8Args:
    """The kernel arguments of outs = epilogue(x weights^T) for all tokens.

    Raises ValueError if the tiles do not hold codes of x.kind without scales, or have other columns
    than x.
    """
    first = weights[0]
    if not supports_kind(first, x.kind):
        raise ValueError(f"{first.layout.type_name} has no {x.kind} codes without scales")
    if first.k != x.k or first.k > MAX_K:
        raise ValueError(
            f"x has {x.k} columns, the weights {first.k}: they must be equal, at most {MAX_K}"
        )
    args = W8A8Args(
        x=address(x.codes),
        x_scale=address(x.scales),
        residual=address(residual),
        end_token=x.n_tokens,
        soft_cap=soft_cap,
    )
    args.set_matrices(weights, outs, x.n_tokens, epilogue, activation)
    return args


def supports_kind(w: TiledMatrix, kind: Kind) -> bool:
    """Whether the W8A8 GEMMs can multiply the matrix with activations of the kind."""
    layout = w.layout
    of_kind = layout.bits == 8 and (layout.values or "Integers") == VALUES[kind]
    return of_kind and layout.chunk_k == STEP and not layout.is_scaled


def runs_on(kind: Kind, arch: str) -> bool:
    """Whether the tensor cores of an architecture ("sm_89") multiply codes of the kind."""
    return kind == "int8" or capability(arch) >= 89


class W8A8Prefill:
    """y = x W^T for prefill. An instance is compiled at its first launch."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernels: dict[tuple, Kernel] = {}

    def launch(
        self,
        weights: Sequence[TiledMatrix],
        x: QuantizedRows,
        outs: Sequence[Address],
        *,
        epilogue: Epilogue = "STORE",
        residual: Address | None = None,
        activation: str = "silu",
        soft_cap: float = 0.0,
    ) -> None:
        """Enqueue outs[i][n_tokens, rows of weights[i]] = (x weights[i]^T) * x_scale * row_scale.

        Epilogues as in GemmDecode.launch. All weights have one layout, with codes of x.kind.
        """
        args = w8a8_args(weights, x, outs, epilogue, residual, activation, soft_cap)
        rows = TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS
        grid = -(-x.n_tokens // TOKENS), -(-args.n_tiles // rows)
        kernel = self._kernel(x.kind, epilogue)
        kernel.launch(grid, THREADS, (args,), smem=SHARED, pdl=True)

    def _kernel(self, kind: Kind, epilogue: Epilogue) -> Kernel:
        key = kind, epilogue
        if key not in self._kernels:
            name = f"w8a8_prefill<{VALUES[kind]}, {epilogue}>"
            self._kernels[key] = self.device.kernel(
                "w8a8/w8a8_prefill.cu", name, extra_source=ASSERTS
            )
        return self._kernels[key]
