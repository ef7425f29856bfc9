"""Norms of the residual stream, as planned: by a kernel, or deferred from one product to the next.

A deferred norm has no kernel. The product that adds to x also stores x * weight * factor in f16 and
sums of squares of x, and the next product multiplies its outputs by the rest of the norm
(cuda/norm/deferred_norm.cuh). The factor of a token is the one that the previous norm multiplied it
by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...kernels.norm.deferred_norm import MAX_TOKENS, DeferredNorm, squares_bytes
from ...kernels.norm.rms_norm import RmsNorm
from ..interface import Norm
from .arrays import Array, Memory
from .weights_f16 import Scratch


class Norms:
    """One step at a time: call begin, then the norms in the order of the network."""

    def __init__(
        self,
        device: Any,
        kernel: RmsNorm,
        f16: Callable[[str, int, int, int], Array],
        scratch: Scratch,
    ) -> None:
        """f16(name, rows, columns, layout) and scratch(name, bytes) return scratch memory."""
        self._device, self._kernel, self._f16, self._scratch = device, kernel, f16, scratch
        self._identities: dict[int, Norm] = {}  # by columns
        self._scaled: dict[tuple[Norm, float], Norm] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._n_factors = 0  # norms so far that have stored factors
        self._deferred: tuple[Array, int] | None = None

    def compute(
        self, x: Array, norm: Norm, n: int, layout: int, rows: Memory | None, leaves_factors: bool
    ) -> Array:
        """norm(x[rows]), f16 [n, K] in the layout. leaves_factors: store factors, so that the next
        norm may be deferred.
        """
        k = x.shape[1]
        normed = self._f16("normed", n, k, layout)
        self._n_factors = self._n_factors + 1 if leaves_factors else 0
        factors = self._factors() if leaves_factors else None
        sizes = n, k, norm.eps, layout
        self._kernel.to_f16(x.data, rows, norm.weight, normed.data, *sizes, factors)
        return normed

    def identity(self, k: int) -> Norm:
        """The RMS norm of rows of k columns that leaves x as it is, up to rounding: with eps 2^100
        and weights 2^50, mean(x^2) does not count.
        """
        if k not in self._identities:
            self._identities[k] = Norm(self._vector(np.full(k, 2.0**50), "no norm"), 2.0**100)
        return self._identities[k]

    def scaled(self, norm: Norm, k: int, scale: float) -> Norm:
        """The norm with the scale in its weights[k]. The first call copies these to the host."""
        if scale == 1:
            return norm
        if (norm, scale) not in self._scaled:
            weights = self._device.download(norm.weight, np.float32, (k,))
            scaled = self._vector(np.float32(scale) * weights, "scaled norm")
            self._scaled[norm, scale] = replace(norm, weight=scaled)
        return self._scaled[norm, scale]

    def _vector(self, values: NDArray, name: str) -> Buffer:
        array = np.ascontiguousarray(values, np.float32)
        buffer: Buffer = self._device.alloc(array.nbytes, name)
        self._device.upload(buffer, array)
        return buffer

    def to_f32(self, y: Array, norm: Norm, memory: Buffer) -> Array:
        """norm(y) in f32, in other memory than y: added to zeros."""
        n, k = y.shape
        self._device.fill(memory.part(0, 4 * n * k), 0)
        out = Array(memory, np.float32, (n, k), k)
        self.add(out, y, norm)
        return out

    def add(self, x: Array, y: Array, norm: Norm) -> None:
        """x += norm(y), in place."""
        n, k = x.shape
        self._kernel.add(x.data, y.data, norm.weight, n, k, norm.eps)

    def defer(self, norm: Norm, x: Array, layout: int, square_columns: int) -> DeferredNorm:
        """Operands of the product that adds to x and defers `norm`, the next norm of x."""
        n, k = x.shape
        normed = self._f16("normed", n, k, layout)
        self._deferred = normed, k // square_columns
        squares, factors = self._squares(k), self._factors()
        data = normed.data
        return DeferredNorm(squares, k // square_columns, factors, None, norm.weight, data, layout)

    def take(self, norm: Norm) -> tuple[Array, DeferredNorm]:
        """The deferred norm of the previous product: its f16 output as the next product's input,
        and the operands to apply the rest of the norm. RuntimeError if no norm was deferred.
        """
        if self._deferred is None:
            raise RuntimeError("no product has left a norm")
        (normed, n_parts), self._deferred = self._deferred, None
        before = self._factors()
        self._n_factors += 1
        squares, after = self._squares(normed.shape[1]), self._factors()
        return normed, DeferredNorm(squares, n_parts, before, after, eps=norm.eps)

    def _squares(self, k: int) -> Buffer:
        return self._scratch("squares", squares_bytes(k))

    def _factors(self) -> Buffer:
        """The last norm's factors; those of the norm before it are still valid."""
        return self._scratch(f"factors {self._n_factors % 2}", 4 * MAX_TOKENS)
