"""Launches cuda/blocks/get_rows.cu: token embedding from a table of quant blocks, in float."""

from __future__ import annotations

from typing import Any

from ...device.base import Device
from .block_kernel import Address, BlockMatrix, block_kernel, require
from .dequantize import THREADS, row_grid


def get_rows(
    device: Device,
    w: BlockMatrix,
    ids: Address,
    out: Address,
    n_tokens: int,
    *,
    sampled: Address | None = None,
    scale: float = 1.0,
    pdl: bool = False,
    stream: Any = None,
) -> None:
    """Enqueue out[n_tokens, columns] = scale * w[ids] in float; an id past the last row gives NaN.

    Ids are int32. With `sampled`, a negative id ~r stands for sampled[r]. Raises ValueError if ids
    or out is too small.
    """
    require(ids, n_tokens * 4, f"{n_tokens} ids")
    require(out, n_tokens * w.columns * 4, f"floats [{n_tokens}, {w.columns}]")
    kernel = block_kernel(device, "blocks/get_rows.cu", "get_rows", w.format)
    args = (w.data, ids, sampled, out, w.rows, w.columns, float(scale))
    kernel.launch(row_grid(n_tokens, w.columns), THREADS, args, pdl=pdl, stream=stream)
