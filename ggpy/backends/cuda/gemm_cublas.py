"""`--gemm cublas`: products of many tokens as everybody makes them, to be compared with.

A matrix becomes rows of halves in scratch memory, whatever it lies in, and cuBLAS multiplies them.
"""

from __future__ import annotations

from typing import Any

from ...device.cublas import Cublas
from ...kernels.layout.pack import PLAIN
from .arrays import Array, Matrix
from .gemm_f16 import MANY_TOKENS, HalfRows, Room, columns_of


class CublasProducts:
    """Multiplies with cuBLAS; CublasMissing where there is none."""

    def __init__(self, device: Any, room: Room) -> None:
        """room(name, bytes): scratch memory."""
        self._cublas, self._rows = Cublas(device), HalfRows(device, room)

    @staticmethod
    def takes(w: Matrix, n_tokens: int) -> bool:
        """Whether w is multiplied here; scales of rows are for others."""
        return n_tokens >= MANY_TOKENS and w.k % 8 == 0 and w.scale is None

    def multiply(self, x: Array, w: Matrix, y: Array, add: bool) -> None:
        """Float y[T, n_rows] (+)= half x[T, k] w^T."""
        if x.order != PLAIN:
            raise RuntimeError("activations were packed for a product of tiles")
        n = y.shape[0]
        for rows, first, count in self._rows.parts(w):
            out = columns_of(y, first).data
            self._cublas.multiply(x.data, rows, out, n, count, w.k, stride=y.shape[1], add=add)
