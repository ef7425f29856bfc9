"""Weights that stay in the blocks of the file: products by kernels, rows by ggpy.formats.

A matrix has the methods of the numpy backend's, so ops without kernels are computed as there.
Nothing here knows what a weight is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ...gguf import Tensor
from ..numpy.matrix import HostMatrix
from .jobs import BlockRows

Multiply = Callable[[BlockRows, F32], F32]


class MappedMatrix(HostMatrix):
    """w[N, K], or w[X, N, K] of experts, in a format that has kernels.

    multiply: the backend's product of x and one w[N, K]. scale: [1 or more], equal numbers for a
    matrix; [X] for experts.
    """

    def __init__(self, tensor: Tensor, multiply: Multiply, scale: F32 | None = None) -> None:
        of_experts = len(tensor.shape) > 2
        super().__init__(tensor, None, scale if of_experts else None)
        data = tensor.data
        one = data if len(tensor.shape) == 2 else data[0]
        if not one.flags.c_contiguous:  # each matrix must be contiguous; experts may lie apart
            data = np.ascontiguousarray(data)
        data = data.view(np.uint8).reshape(*tensor.shape[:-1], -1)
        factor = 1.0 if scale is None or of_experts else float(scale[0])
        self.blocks = BlockRows(tensor.format, data, tensor.shape[-1], factor)
        self._multiply = multiply

    def expert(self, index: int) -> MappedMatrix:
        """w[index] of w[X, N, K]."""
        tensor, data = self.tensor, self.blocks.data[index]
        scale = None if self.scale is None else self.scale[index : index + 1]
        one = replace(tensor, shape=tensor.shape[1:], data=data)
        return MappedMatrix(one, self._multiply, scale)

    def rows(self, ids: NDArray) -> F32:
        """w[ids], float32."""
        return super().rows(ids) * np.float32(self.blocks.scale)

    def _product(self, x: F32) -> F32:
        return self._multiply(self.blocks, x)
