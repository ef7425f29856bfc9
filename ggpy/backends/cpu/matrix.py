"""Weights that stay in the blocks of the file: products by kernels, rows by ggpy.formats.

A matrix can do what the numpy backend's can, so whatever has no kernel of its own is computed as
there. Nothing here knows what a weight is for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.base import F32
from ...gguf import Tensor
from ..numpy.matrix import HostMatrix
from .jobs import BlockRows

Multiply = Callable[[BlockRows, F32], F32]


class MappedMatrix(HostMatrix):
    """w[N, K] in a format that has kernels; `multiply` is the backend's."""

    def __init__(self, tensor: Tensor, multiply: Multiply) -> None:
        super().__init__(tensor, None)
        n, k = tensor.shape
        data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(n, -1)
        self.blocks = BlockRows(tensor.format, data, k)
        self._multiply = multiply

    def _product(self, x: F32) -> F32:
        return self._multiply(self.blocks, x)
