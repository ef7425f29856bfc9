"""A norm that one product of few tokens hands on to the next (cuda/norm/deferred_norm.cuh)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..address import Address, address
from ..layout.pack import PLAIN

MOST_TOKENS = 16
PART = 16  # columns whose squares are added up together, at least


@dataclass(frozen=True)
class Handed:
    """x[T, k] between the product that adds to it and the one behind, which has its norm.

    squares: floats [parts, 8 or 16], of as many columns each, in squares_bytes. before, after:
    floats [T], what x is multiplied by beforehand in this norm and the next. normed: halves [T, k],
    packed in `order`, of the product that adds, with the norm's weight [k]; eps: of the product
    behind.
    """

    squares: Address
    parts: int
    before: Address
    after: Address | None = None
    weight: Address | None = None
    normed: Address | None = None
    order: int = PLAIN
    eps: float = 0.0

    def parameters(self) -> HandedParameters:
        """The structure of cuda/norm/deferred_norm.cuh."""
        pointers = self.squares, self.before, self.weight, self.normed, self.after
        return HandedParameters(*map(address, pointers), self.eps, self.parts, self.order)


class HandedParameters(ctypes.Structure):
    """Handed, of cuda/norm/deferred_norm.cuh; all zeros: nothing is handed on."""

    _fields_ = (
        ("squares", ctypes.c_uint64),
        ("before", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("after", ctypes.c_uint64),
        ("eps", ctypes.c_float),
        ("parts", ctypes.c_int),
        ("order", ctypes.c_int),
    )


def squares_bytes(k: int) -> int:
    """Bytes of the sums of squares of x[T, k]."""
    return 4 * (k // PART) * MOST_TOKENS
