"""Norms of the residual stream, as planned: by a kernel, or deferred from one product to the next.

A deferred norm has no kernel. The product that adds to x also stores x * weight * factor in f16 and
sums of squares of x; the next product multiplies its outputs by the rest of the norm
(cuda/norm/deferred_norm.cuh). The factor of a token is the factor of the previous norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...kernels.norm.deferred_norm import MAX_TOKENS, DeferredNorm, squares_bytes
from ...kernels.norm.rms_norm import NormKind, RmsNorm
from ..interface import Norm
from .arrays import Array, Memory
from .weights_f16 import Scratch


class Norms:
    """One step at a time: call begin, then the norms in the order of the network."""

    def __init__(
        self,
        device: Any,
        rms: RmsNorm,
        f16: Callable[[str, int, int, int], Array],
        scratch: Scratch,
    ) -> None:
        """rms: kernels of RMS norms without a bias. f16(name, rows, columns, layout) and
        scratch(name, bytes) return scratch memory.
        """
        self._device, self._f16, self._scratch = device, f16, scratch
        self._rms = rms
        kinds: tuple[NormKind, ...] = ("rms with bias", "layer")
        self._others = {kind: RmsNorm(device, rms.warps, kind) for kind in kinds}
        self._identities: dict[int, Norm] = {}  # by columns
        self._scaled: dict[tuple[Norm, float], Norm] = {}
        self._weights: dict[tuple[Norm, int], Buffer] = {}  # of norms that self._others computes
        self._ones: dict[int, Buffer] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._n_factors = 0  # norms so far that have stored factors
        self._deferred: tuple[Array, int] | None = None
        self.last: Array | None = None  # the last result of `compute` or `add_next`

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
        kernel, weights = self._rms, norm.weight
        if norm.centred or norm.bias is not None or weights is None:
            kernel, weights = self._other(norm, k)
        kernel.to_f16(x.data, rows, weights, normed.data, *sizes, factors)
        self.last = normed
        return normed

    def _other(self, norm: Norm, k: int) -> tuple[RmsNorm, Memory]:
        """The kernel of a norm that is not a plain RMS norm with weights, and the weights in the
        form that it takes. The first call copies them to the host.
        """
        kind: NormKind = "layer" if norm.centred else "rms with bias"
        key = norm, k
        if key not in self._weights:
            both = self._values(norm.weight, k, 1.0), self._values(norm.bias, k, 0.0)
            self._weights[key] = self._vector(np.stack(both), "norm")
        return self._others[kind], self._weights[key]

    def weight_of_heads(self, norm: Norm | None, k: int) -> Buffer | None:
        """The weights of a norm of heads of k elements; ones if it has none."""
        if norm is None:
            return None
        if norm.weight is not None:
            weight: Buffer = norm.weight
            return weight
        if k not in self._ones:
            self._ones[k] = self._vector(np.ones(k, np.float32), "norm")
        return self._ones[k]

    def _values(self, vector: Buffer | None, k: int, usual: float) -> NDArray[np.float32]:
        """A vector on the host; `usual` k times if there is none."""
        if vector is None:
            return np.full(k, usual, np.float32)
        return self._device.download(vector, np.float32, (k,))

    def identity(self, k: int) -> Norm:
        """An RMS norm of rows of k columns that leaves x as it is, up to rounding: with eps 2^100
        and weights 2^50, mean(x^2) is negligible.
        """
        if k not in self._identities:
            self._identities[k] = Norm(self._vector(np.full(k, 2.0**50), "no norm"), 2.0**100)
        return self._identities[k]

    def scaled(self, norm: Norm, k: int, scale: float) -> Norm:
        """The norm of k columns, times the scale. The first call copies its weights to the host."""
        if scale == 1:
            return norm
        key = norm, scale
        if key not in self._scaled:
            factor = np.float32(scale)
            weight = self._vector(factor * self._values(norm.weight, k, 1.0), "scaled norm")
            bias = None
            if norm.bias is not None:
                bias = self._vector(factor * self._values(norm.bias, k, 0.0), "scaled norm")
            self._scaled[key] = replace(norm, weight=weight, bias=bias)
        return self._scaled[key]

    def _vector(self, values: NDArray, name: str) -> Buffer:
        array = np.ascontiguousarray(values, np.float32)
        buffer: Buffer = self._device.alloc(array.nbytes, name)
        self._device.upload(buffer, array)
        return buffer

    def to_f32(self, y: Array, norm: Norm, memory: Buffer) -> Array:
        """norm(y) in f32 in `memory`, which must not be that of y: the norm is added to zeros."""
        n, k = y.shape
        self._device.fill(memory.part(0, 4 * n * k), 0)
        out = Array(memory, np.float32, (n, k), k)
        self.add(out, y, norm)
        return out

    def add(self, x: Array, y: Array, norm: Norm) -> None:
        """x += norm(y), in place."""
        n, k = x.shape
        kernel, weights = self._rms, norm.weight
        if norm.centred or norm.bias is not None or weights is None:
            kernel, weights = self._other(norm, k)
        kernel.add(x.data, y.data, weights, n, k, norm.eps)

    def add_next(self, x: Array, y: Array, norm: Norm, next_norm: Norm, layout: int) -> None:
        """x += norm(y), in place, then `last` = next_norm(x), f16 in the layout."""
        n, k = x.shape
        self.last = self._f16("normed", n, k, layout)
        of_y, of_x = ((one.weight, one.eps) for one in (norm, next_norm))
        self._rms.add_next(x.data, y.data, of_y, of_x, self.last.data, n, k, layout)

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
