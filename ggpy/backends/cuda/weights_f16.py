"""Converts weights to f16 for prefill GEMMs that cannot take them as they are stored.

Matrices in blocks become f16 tiles in scratch memory; for cuBLAS every matrix becomes f16 rows. A
matrix that is larger than the scratch memory is converted in pieces. Weights are rounded to the
nearest f16 and saturate at +-65504, because an MXFP4 scale may be as large as 2^127 and would give
infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...device.base import Buffer
from ...formats import Format
from ...kernels.blocks.block_kernel import BlockMatrix, offset
from ...kernels.layout.blocks_to_f16 import F16_TILES, blocks_to_f16_rows, blocks_to_f16_tiles
from ...kernels.layout.dequantize_tile import DequantizeTile
from ...kernels.layout.tile import ROWS, TiledMatrix, layout_of
from .arrays import Array, Matrix

NAME = "weights as f16"
SCRATCH = 256 << 20  # bytes of f16 weights at once: gate and up of 14336 x 4096 fit
SAME_X = 3  # most matrices with the same x that are converted at once, in sizes of the largest
Scratch = Callable[[str, int], Buffer]  # scratch memory by name and number of bytes


@dataclass(frozen=True)
class PartOfRows(TiledMatrix):
    """`count` rows in tiles of a matrix of n_rows rows, which determine the pitch of the
    outputs.
    """

    count: int = 0

    @property
    def tile_rows(self) -> int:
        """Tile rows of the part."""
        return -(-self.count // ROWS)


def can_be_f16(k: int) -> bool:
    """Whether GEMMs take f16 tiles of k columns."""
    return k % 8 == 0


def scratch_bytes(
    matrices: Iterable[tuple[Format, int, int]],
    gemm: str,
    keeps_blocks: Callable[[Format], bool] = lambda format: False,
) -> int:
    """The most bytes of scratch memory for the f16 weights of a model's (format, rows, columns).

    Counts SAME_X matrices with the same x, and at most SCRATCH for matrices that can be divided
    into pieces. keeps_blocks: whether a format with tiles stays in blocks.
    """
    most = 0
    for format, n_rows, k in matrices:
        in_blocks = layout_of(format, k) is None or keeps_blocks(format)
        if gemm == "cublas" and can_be_f16(k):
            most = max(most, min(SCRATCH, 2 * n_rows * k))
        elif gemm == "auto" and in_blocks and can_be_f16(k):
            nbytes = F16_TILES.nbytes(n_rows, k)
            most = max(most, nbytes if n_rows % ROWS else min(SCRATCH, SAME_X * nbytes))
    return most


def pieces(n_rows: int, row_bytes: int, unit: int = ROWS) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of pieces of at most SCRATCH bytes; the number is a multiple of
    `unit`.
    """
    at_once = max(unit, SCRATCH // row_bytes // unit * unit)
    for first in range(0, n_rows, at_once):
        yield first, min(at_once, n_rows - first)


def fit_scratch(weights: Sequence[Matrix]) -> bool:
    """Whether the f16 tiles of all weights fit in the scratch memory at the same time."""
    sizes = [F16_TILES.nbytes(w.n_rows, w.k) for w in weights]
    return sum(sizes) <= min(SCRATCH, SAME_X * max(sizes))


class F16Tiles:
    """Converts matrices in blocks to f16 tiles."""

    def __init__(self, device: Any, scratch: Scratch) -> None:
        self.device, self._scratch = device, scratch

    def make(self, weights: list[Matrix]) -> list[TiledMatrix]:
        """Enqueue the conversion of all weights into adjacent memory."""
        sizes = [F16_TILES.nbytes(w.n_rows, w.k) for w in weights]
        scratch, at = self._scratch(NAME, sum(sizes)), 0
        made = []
        for w, nbytes in zip(weights, sizes, strict=True):
            made.append(blocks_to_f16_tiles(self.device, w.in_blocks, scratch.at(at)))
            at += nbytes
        return made

    def parts(self, w: Matrix, out: Array) -> Iterator[tuple[TiledMatrix, Array]]:
        """Enqueue the conversion of w piece by piece, each with its columns of out[T, n_rows]. The
        caller must enqueue the product of a piece before it takes the next piece.
        """
        row_bytes = F16_TILES.nbytes(ROWS, w.k) // ROWS
        # Rows past the end of a partial tile would be written over the next token's outputs.
        cuts = [(0, w.n_rows)] if w.n_rows % ROWS else pieces(w.n_rows, row_bytes)
        for first, count in cuts:
            scratch = self._scratch(NAME, F16_TILES.nbytes(count, w.k))
            blocks_to_f16_tiles(self.device, blocks_from(w.in_blocks, first, count), scratch)
            yield PartOfRows(F16_TILES, w.n_rows, w.k, scratch, count=count), columns_of(out, first)


def blocks_from(w: BlockMatrix, first: int, count: int) -> BlockMatrix:
    """Rows first ... first + count - 1 of w."""
    at = offset(w.data, first * w.format.row_bytes(w.columns))
    return BlockMatrix(w.format, count, w.columns, at)


def columns_of(out: Array, first: int) -> Array:
    """out from column `first` on, with the same row pitch."""
    return replace(out, data=offset(out.data, first * np.dtype(out.dtype).itemsize))


class F16Rows:
    """Converts any matrix to f16 rows."""

    def __init__(self, device: Any, scratch: Scratch) -> None:
        self.device, self._scratch = device, scratch
        self._from_tiles = DequantizeTile(device)

    def parts(self, w: Matrix) -> Iterator[tuple[Buffer, int, int]]:
        """Enqueue the conversion piece by piece: f16 [rows][k], the first row, and the number of
        rows.
        """
        for first, count in pieces(w.n_rows, 2 * w.k):
            scratch = self._scratch(NAME, 2 * count * w.k)
            if w.tiles is None:
                blocks_to_f16_rows(self.device, blocks_from(w.in_blocks, first, count), scratch)
            else:
                layout = w.tiles.layout
                at = offset(w.tiles.data, layout.nbytes(first, w.k))
                self._from_tiles.launch(TiledMatrix(layout, count, w.k, at), scratch)
            yield scratch, first, count
