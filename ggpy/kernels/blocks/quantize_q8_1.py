"""Launches cuda/blocks/quantize_q8_1.cu: quantises activations to block_q8_1, for mul_mat_vec_q."""

from __future__ import annotations

from typing import Any, Literal

from ...device.base import Device
from ...formats import by_name
from .block_kernel import Address, require
from .dequantize import SIZES

THREADS = 256
VALUES = 4  # activations per thread


def q8_1_bytes(n_tokens: int, columns: int) -> int:
    """Bytes of x[n_tokens, columns] as block_q8_1. ValueError if 32 does not divide columns."""
    return n_tokens * by_name("Q8_1").row_bytes(columns)


def quantize_q8_1(
    device: Device,
    x: Address,
    out: Address,
    n_tokens: int,
    columns: int,
    *,
    x_type: Literal["float", "half"] = "float",
    pdl: bool = False,
    stream: Any = None,
) -> None:
    """Enqueue out = x[n_tokens, columns] as block_q8_1 [n_tokens, columns / 32].

    The bytes equal the numpy quantiser's. A block of x with a NaN or an infinity gets a NaN or
    infinite scale. Raises ValueError if columns are not a multiple of 32 or a buffer is too small.
    """
    values = n_tokens * columns
    require(x, values * SIZES[x_type], f"{x_type}s [{n_tokens}, {columns}]")
    require(out, q8_1_bytes(n_tokens, columns), f"block_q8_1 [{n_tokens}, {columns // 32}]")
    kernel = device.kernel("blocks/quantize_q8_1.cu", f"quantize_q8_1<{x_type}>")
    grid = -(-values // (VALUES * THREADS))
    kernel.launch(grid, THREADS, (x, out, values // 32), pdl=pdl, stream=stream)
