"""The launch of the GEMV kernels mul_mat_vec_q and dequantize_mul_mat_vec: grid and token groups.

One launch takes up to 8 tokens; more tokens take several launches. This module knows no format, and
of activations only the bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...device.base import Grid, Kernel
from .block_kernel import Address, BlockMatrix, offset, require

MAX_TOKENS = 8  # tokens per launch
WARPS = 8  # warps per CTA
ENOUGH_WARPS = 16384  # two waves of warps on a large GPU: rows are not split for more warps


def launch_shape(rows: int, columns: int) -> tuple[int, Grid]:
    """(grid, threads of a CTA): one warp per row, or 2, 4 or 8 warps if rows are few and long.

    The shape depends only on the matrix, not on the GPU or the number of tokens, because it
    determines the order of the sums and so the bits of the result.
    """
    parts = 1
    while parts < WARPS and rows * parts < ENOUGH_WARPS and columns // 8 > parts * 64:
        parts *= 2
    return -(-rows * parts // WARPS), (32, parts, WARPS // parts)


def mul_mat_vec(
    kernel: Callable[[int], Kernel],
    w: BlockMatrix,
    x: Address,
    x_row_bytes: int,
    y: Address,
    n_tokens: int,
    residual: Address | None,
    pdl: bool,
    stream: Any,
) -> None:
    """Enqueue y[n_tokens, rows] = x W^T (+ residual): one launch per MAX_TOKENS tokens.

    `kernel(T)` returns the kernel for T tokens. Raises ValueError if a buffer is too small.
    """
    floats = f"floats [{n_tokens}, {w.rows}]"
    require(x, n_tokens * x_row_bytes, f"x [{n_tokens}, {w.columns}]")
    require(y, n_tokens * w.rows * 4, floats)
    if residual is not None:
        require(residual, n_tokens * w.rows * 4, floats)
    grid, threads = launch_shape(w.rows, w.columns)
    for first in range(0, n_tokens, MAX_TOKENS):
        start = first * w.rows * 4
        added = None if residual is None else offset(residual, start)
        args = (w.data, offset(x, first * x_row_bytes), added, offset(y, start), w.rows, w.columns)
        tokens = min(MAX_TOKENS, n_tokens - first)
        kernel(tokens).launch(grid, threads, args, pdl=pdl, stream=stream)
