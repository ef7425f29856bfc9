"""Launches cuda/blocks/dequantize.cu: quant blocks of any format to float, half or bfloat16."""

from __future__ import annotations

from typing import Any, Literal

from ...device.base import Device
from .block_kernel import Address, BlockMatrix, block_kernel, require

THREADS = 128
Number = Literal["float", "half", "bfloat16"]
CPP_TYPES = {"float": "float", "half": "half", "bfloat16": "__nv_bfloat16"}
SIZES = {"float": 4, "half": 2, "bfloat16": 2}


def row_grid(rows: int, columns: int) -> tuple[int, int]:
    """The grid (rows, parts of a row), with THREADS threads per CTA and 8 weights per thread."""
    return rows, -(-columns // (8 * THREADS))


def dequantize(
    device: Device, w: BlockMatrix, out: Address, number: Number = "float", stream: Any = None
) -> None:
    """Enqueue out[rows, columns] = w. Floats equal the numpy dequantisers bit by bit.

    Raises ValueError if out is too small.
    """
    require(out, w.rows * w.columns * SIZES[number], f"{number}s [{w.rows}, {w.columns}]")
    kernel = block_kernel(device, "blocks/dequantize.cu", "dequantize", w.format, CPP_TYPES[number])
    kernel.launch(row_grid(w.rows, w.columns), THREADS, (w.data, out, w.columns), stream=stream)
