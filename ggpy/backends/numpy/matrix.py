"""Weights as matrices: float32, or blocks that are dequantised at each use.

They multiply and look up rows. Nothing here knows the role of a weight, or how much memory is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...formats import by_name
from ...formats.base import F32
from ...formats.rows import encode_rows, row_scales
from ...gguf import Tensor
from .. import host
from ..interface import ActivationType

CHUNK_WEIGHTS = 1 << 19  # weights dequantised at a time
EXACT_COLUMNS = 1024  # products of two bytes that add up to less than 2^24, whatever the order

ROUNDED = {"int8": by_name("I8"), "e4m3": by_name("F8_E4M3")}  # what activations become


class HostMatrix:
    """A weight w[N, K], or experts w[X, N, K]: float32 if `array` is set, otherwise blocks.

    Neither includes the scale[N] of rows, or the scale[X] of experts, if there is one.
    """

    def __init__(
        self,
        tensor: Tensor,
        array: F32 | None,
        scale: F32 | None = None,
        activations: ActivationType = "f16",
    ) -> None:
        self.tensor = tensor
        self.array = array
        self.scale = scale
        self.activations = activations

    def expert(self, index: int) -> HostMatrix:
        """w[index] of w[X, N, K]."""
        return HostMatrix(
            replace(self.tensor, shape=self.tensor.shape[1:], data=self.tensor.data[index]),
            None if self.array is None else self.array[index],
            None if self.scale is None else self.scale[index],
            self.activations,
        )

    def multiply(self, x: F32) -> F32:
        """x[T, K] -> x w^T [T, N]."""
        format = ROUNDED.get(self.activations)
        if format is None:
            y = self._product(x)
        else:
            scale = row_scales(x, format)
            values = format.dequantize(encode_rows(x, scale, format))
            y = self._product(values) * scale[:, None]
        return y if self.scale is None else y * self.scale

    def affine(self, x: F32, bias: F32 | None) -> F32:
        """x w^T + bias[N]."""
        y = self.multiply(x)
        return y if bias is None else y + bias

    def rows(self, ids: NDArray) -> F32:
        """w[ids], float32."""
        if self.array is not None:
            found = self.array[ids]
        else:
            found = self.tensor.format.dequantize(self.tensor.data[ids])
        return found if self.scale is None else found * self.scale[ids, None]

    def _product(self, x: F32) -> F32:
        """x[T, K] -> x values^T [T, N]."""
        product = _whole_product if self.activations == "int8" else np.matmul
        if self.array is not None:
            return product(x, self.array.T)
        format, data = self.tensor.format, self.tensor.data
        chunks = row_chunks(*self.tensor.shape)
        parts = [product(x, format.dequantize(data[rows]).T) for rows in chunks]
        return np.concatenate(parts, axis=1)


def dequantized(tensor: Tensor) -> F32:
    """All matrices of a tensor as float32, by chunks of rows, because dequantisers need several
    times the memory of their result.
    """
    out = np.empty(tensor.shape, np.float32)
    rows, data = out.reshape(-1, out.shape[-1]), tensor.data.reshape(-1, tensor.data.shape[-1])
    for chunk in row_chunks(*rows.shape):
        rows[chunk] = tensor.format.dequantize(data[chunk])
    host.drop_pages(tensor.data)
    return out


def row_chunks(n_rows: int, columns: int) -> Iterator[slice]:
    """Rows with about CHUNK_WEIGHTS weights at a time."""
    size = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def _whole_product(x: F32, w: F32) -> F32:
    """x[T, K] w[K, N] of 8-bit whole numbers; the sums are exact, and rounded once at the end."""
    total = np.zeros((len(x), w.shape[1]))
    for start in range(0, len(w), EXACT_COLUMNS):
        part = slice(start, start + EXACT_COLUMNS)
        total += x[:, part] @ w[part]
    return total.astype(np.float32)
