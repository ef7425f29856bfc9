"""What the wrappers of the matrix-vector kernels share: the launch's shape, tokens by the eight.

Knows nothing of formats or of how activations are stored, but their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...device.base import Grid, Kernel
from .block_kernel import Address, BlockMatrix, offset, require

MAX_TOKENS = 8  # of one launch
WARPS = 8  # of a block of threads
ENOUGH_WARPS = 16384  # two rounds of a large GPU: no need to split rows for more


def launch_shape(rows: int, columns: int) -> tuple[int, Grid]:
    """(grid, threads): a warp for each row, or 2, 4, 8 warps where rows are few and long.

    It follows from the matrix alone, not from the GPU or the number of tokens, because it decides
    the order of sums.
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
    """Launch kernel(T) for each T <= MAX_TOKENS tokens: y[n_tokens, rows] = x W^T (+ residual)."""
    floats = f"floats [{n_tokens}, {w.rows}]"
    require(x, n_tokens * x_row_bytes, f"x [{n_tokens}, {w.columns}]")
    require(y, n_tokens * w.rows * 4, floats)
    if residual is not None:
        require(residual, n_tokens * w.rows * 4, floats)
    grid, threads = launch_shape(w.rows, w.columns)
    for first in range(0, n_tokens, MAX_TOKENS):
        at = first * w.rows * 4
        added = None if residual is None else offset(residual, at)
        args = (w.data, offset(x, first * x_row_bytes), added, offset(y, at), w.rows, w.columns)
        tokens = min(MAX_TOKENS, n_tokens - first)
        kernel(tokens).launch(grid, threads, args, pdl=pdl, stream=stream)
