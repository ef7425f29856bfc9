"""Kernel parameters that all GEMMs on tiled weights share (cuda/gemm/gemm.cuh): matrices, epilogues
and activations.

Each kernel derives a structure from GemmArgs and appends its own parameters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from ..address import Address, address
from ..layout.tile import TiledMatrix

Epilogue = Literal["STORE", "ADD", "GLU", "QKV", "INPUT"]
NO_TILE = 2**31 - 1
STATIC_SHARED = 1 << 10  # bytes of static shared memory that a kernel may declare
# the L2 policy that createpolicy.fractional.L2::evict_first returns (sm_90)
EVICT_FIRST = 0x12F0000000000000
SEGMENTS = 4  # matrices of a GEMM at most
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
INPUT_RANGE = 64.0  # by which x is divided where INPUT multiplies it (cuda/lib/activation.cuh)


class Segment(ctypes.Structure):
    """struct Segment: one weight matrix of a GEMM, whose output is [n_tokens, n_rows]."""

    _fields_ = (
        ("tiles", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("row_scale", ctypes.c_uint64),
        ("n_rows", ctypes.c_int),
        ("first_tile", ctypes.c_int),
    )


class GemmArgs(ctypes.Structure):
    """struct GemmArgs: parameters of every GEMM."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("segment", Segment * SEGMENTS),
        ("streaming", ctypes.c_uint64),
        ("n_tiles", ctypes.c_int),
        ("n_tokens", ctypes.c_int),
        ("k", ctypes.c_int),
        ("n_chunk", ctypes.c_int),
        ("activation", ctypes.c_int),
    )

    def set_matrices(
        self,
        weights: Sequence[TiledMatrix],
        outs: Sequence[Address],
        n_tokens: int,
        epilogue: Epilogue,
        activation: str,
    ) -> None:
        """Set the matrices of outs[i][n_tokens, rows of weights[i]] = x weights[i]^T.

        Raises ValueError unless all matrices have the same layout and the same k, and the number of
        outputs is the one that the epilogue makes.
        """
        first, glu = weights[0], epilogue == "GLU"
        if any(w.layout != first.layout or w.k != first.k for w in weights[1:]):
            raise ValueError(
                "the matrices of one GEMM must have one layout and one number of columns"
            )
        if len(outs) != (1 if glu else len(weights)):
            raise ValueError(
                f"a {epilogue} GEMM cannot have {len(weights)} matrices and {len(outs)} outputs"
            )
        tiles = 0
        for i, segment in enumerate(self.segment):
            if i >= len(weights):
                segment.first_tile = NO_TILE
                continue
            w, out = weights[i], outs[i] if i < len(outs) else None
            segment.tiles, segment.out = address(w.data), address(out)
            segment.row_scale, segment.n_rows = address(w.row_scale), w.n_rows
            segment.first_tile = tiles
            tiles += w.tile_rows
        self.n_tiles = first.tile_rows if glu else tiles
        self.n_tokens, self.activation = n_tokens, ACTIVATIONS[activation]
        # weights leave L2 before the KV cache, norms and code, which are read again
        self.streaming = EVICT_FIRST
        self.k, self.n_chunk = first.k, first.layout.chunks(first.k)
