"""Launches cuda/blocks/dequantize_mul_mat_vec.cu: GEMV of quant blocks, f32 or f16 activations."""

from __future__ import annotations

from typing import Any, Literal

from ...device.base import Device, Kernel
from .block_kernel import Address, BlockMatrix, block_kernel
from .dequantize import SIZES
from .mul_mat_vec import mul_mat_vec


def dequantize_mul_mat_vec(
    device: Device,
    w: BlockMatrix,
    x: Address,
    y: Address,
    n_tokens: int,
    *,
    x_type: Literal["float", "half"] = "half",
    residual: Address | None = None,
    pdl: bool = False,
    stream: Any = None,
) -> None:
    """Enqueue y[n_tokens, rows] = x[n_tokens, columns] W^T (+ residual, which may be y), in float.

    The bits of a token's result do not depend on n_tokens. Raises ValueError if a buffer is too
    small.
    """

    def kernel(tokens: int) -> Kernel:
        name = "dequantize_mul_mat_vec"
        return block_kernel(device, f"blocks/{name}.cu", name, w.format, x_type, tokens)

    mul_mat_vec(kernel, w, x, w.columns * SIZES[x_type], y, n_tokens, residual, pdl, stream)
