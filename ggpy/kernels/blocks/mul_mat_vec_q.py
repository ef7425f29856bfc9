"""Launches cuda/blocks/mul_mat_vec_q.cu: GEMV of quant blocks, activations as block_q8_1."""

from __future__ import annotations

from typing import Any

from ...device.base import Device, Kernel
from .block_kernel import Address, BlockMatrix, block_kernel
from .mul_mat_vec import mul_mat_vec
from .quantize_q8_1 import q8_1_bytes


def mul_mat_vec_q(
    device: Device,
    w: BlockMatrix,
    x: Address,
    y: Address,
    n_tokens: int,
    *,
    residual: Address | None = None,
    pdl: bool = False,
    stream: Any = None,
) -> None:
    """Enqueue y[n_tokens, rows] = x W^T (+ residual, which may be y), in float.

    x is block_q8_1 [n_tokens, columns / 32]. The bits of a token's result do not depend on
    n_tokens. Raises ValueError if columns are not a multiple of 32 or a buffer is too small.
    """

    def kernel(tokens: int) -> Kernel:
        return block_kernel(device, "blocks/mul_mat_vec_q.cu", "mul_mat_vec_q", w.format, tokens)

    mul_mat_vec(kernel, w, x, q8_1_bytes(1, w.columns), y, n_tokens, residual, pdl, stream)
