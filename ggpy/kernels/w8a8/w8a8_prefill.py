"""Launches cuda/w8a8/w8a8_prefill.cu: tiles of 8 bits times 8-bit activations of many tokens, and what
all products of that kind share: their parameters, and which matrices they take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...device.base import Device, Kernel, capability
from ..address import Address, address
from ..attention.rope_kv import TurningParameters
from ..gemm.gemm import Epilogue, Matrices
from ..gemm.hopper import Dealt
from ..layout.tile import TiledMatrix
from .quantize_rows import STEP, VALUES, Kind, QuantizedRows

THREADS = 256
TOKENS = 128  # of a block
TILE_ROWS = 8  # of a block
X_STAGES = 3
SHARED = X_STAGES * TOKENS * STEP  # 48 KB, which every GPU has
MAX_K = 0x7F7F7F7F // (
    127 * 128
)  # sums of more columns may not fit, or be EMPTY (cuda/gemm/tile_scheduler.cuh)
CHUNK_BYTES = 16 * STEP


class W8A8Product(Matrices):
    """struct Product of cuda/w8a8/w8a8.cuh."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("x_scale", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("partial", ctypes.c_uint64),
        ("first_token", ctypes.c_int),
        ("end_token", ctypes.c_int),
        ("dealt", Dealt),
        ("turning", TurningParameters),
        ("eps", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


def w8a8_product(
    weights: Sequence[TiledMatrix],
    x: QuantizedRows,
    outs: Sequence[Address],
    epilogue: Epilogue,
    residual: Address | None,
    activation: str,
    soft_cap: float,
) -> W8A8Product:
    """The parameters of outs = epilogue(x weights^T) for all tokens.

    ValueError unless the tiles hold codes of x's kind and without scales, of as many columns.
    """
    first = weights[0]
    if not takes(first, x.kind):
        raise ValueError(f"{first.layout.type_name} is no tile of {x.kind} codes without scales")
    if first.k != x.k or first.k > MAX_K:
        raise ValueError(
            f"{x.k} columns of x, {first.k} of the weights: take as many, {MAX_K} at most"
        )
    product = W8A8Product(
        x=address(x.codes),
        x_scale=address(x.scales),
        residual=address(residual),
        end_token=x.n_tokens,
        soft_cap=soft_cap,
    )
    product.take(weights, outs, x.n_tokens, epilogue, activation)
    return product


def takes(w: TiledMatrix, kind: Kind) -> bool:
    """Whether a matrix can be multiplied with activations of the kind."""
    layout = w.layout
    of_kind = layout.bits == 8 and (layout.values or "Integers") == VALUES[kind]
    return of_kind and layout.chunk_k == STEP and not layout.is_scaled


def runs_on(kind: Kind, arch: str) -> bool:
    """Whether tensor cores of this architecture ("sm_89") multiply codes of the kind."""
    return kind == "int8" or capability(arch) >= 89


class MulMatW8A8:
    """y = x W^T for many tokens. Instances are compiled as they are asked for."""

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
        """Enqueue outs[i][n_tokens, rows of weights[i]] = x weights[i]^T, by both scales.

        Epilogues as in MulMatTile.launch. All weights have one layout, of codes of x's kind.
        """
        product = w8a8_product(weights, x, outs, epilogue, residual, activation, soft_cap)
        rows = TILE_ROWS // 2 if epilogue == "GLU" else TILE_ROWS
        grid = -(-x.n_tokens // TOKENS), -(-product.n_tiles // rows)
        kernel = self._kernel(x.kind, epilogue)
        kernel.launch(grid, THREADS, (product,), smem=SHARED, pdl=True)

    def _kernel(self, kind: Kind, epilogue: Epilogue) -> Kernel:
        key = kind, epilogue
        if key not in self._kernels:
            name = f"w8a8_prefill<{VALUES[kind]}, {epilogue}>"
            self._kernels[key] = self.device.kernel("w8a8/w8a8_prefill.cu", name)
        return self._kernels[key]
