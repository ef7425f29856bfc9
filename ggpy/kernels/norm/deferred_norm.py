"""Deferred RMS norm between two decode GEMMs (cuda/norm/deferred_norm.cuh)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..address import Address, address
from ..layout.pack import PLAIN

MAX_TOKENS = 16
PART = 16  # minimum number of columns per partial sum of squares


@dataclass(frozen=True)
class DeferredNorm:
    """Arguments of the two GEMMs around a deferred norm of x[T, k]: the first adds to x and writes
    `squares` and `normed`; the second reads `normed` and applies 1 / rms(x).

    field          shape and type             used by
    squares        f32 [parts, 8 or 16]       both; each part sums k / parts columns
    prescale       f32 [T]                    both; factor of x in `normed`
    next_prescale  f32 [T]                    second; prescale of the next norm
    weight         f32 [k]                    first; weight of the norm
    normed         f16 [T, k], in `order`     first; x * weight * prescale
    eps            scalar                     second
    """

    squares: Address
    parts: int
    prescale: Address
    next_prescale: Address | None = None
    weight: Address | None = None
    normed: Address | None = None
    order: int = PLAIN
    eps: float = 0.0

    def args(self) -> DeferredNormArgs:
        """Returns the structure of cuda/norm/deferred_norm.cuh."""
        pointers = self.squares, self.prescale, self.weight, self.normed, self.next_prescale
        return DeferredNormArgs(*map(address, pointers), self.eps, self.parts, self.order)


class DeferredNormArgs(ctypes.Structure):
    """DeferredNormArgs of cuda/norm/deferred_norm.cuh; all zeros: no norm is deferred."""

    _fields_ = (
        ("squares", ctypes.c_uint64),
        ("prescale", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("next_prescale", ctypes.c_uint64),
        ("eps", ctypes.c_float),
        ("parts", ctypes.c_int),
        ("order", ctypes.c_int),
    )


def squares_bytes(k: int) -> int:
    """Bytes of DeferredNorm.squares for x[T, k]."""
    return 4 * (k // PART) * MAX_TOKENS
