"""Weights that become halves for a product of many tokens, where none takes them as they lie.

Formats without tiles become tiles of halves in scratch memory, for the products of tiles; with
cuBLAS, which knows no tiles, every matrix becomes rows. What is too large for the scratch goes in
pieces. Weights are rounded to the nearest half, and those that a half cannot hold become the
largest that it can, +-65504: a checkpoint's weights are far below, and a scale of MXFP4 that is
not (they go up to 2^127) gives a large weight instead of an infinite one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...device.base import Buffer
from ...formats import Format
from ...kernels.blocks.block_kernel import BlockMatrix, offset
from ...kernels.layout.blocks_to_f16 import TILES, halve_to_rows, halve_to_tiles
from ...kernels.layout.dequantize_tile import DequantizeTile
from ...kernels.layout.tile import ROWS, TiledMatrix, layout_of
from .arrays import Array, Matrix

MANY_TOKENS = 32  # of a step, from which on products of many pay where there is no wgmma
NAME = "weights as halves"
SCRATCH = 256 << 20  # bytes of halves at once: gate and up of 14336 x 4096 fit
Gemm = Literal["auto", "cublas"]
Room = Callable[[str, int], Buffer]  # scratch memory by name and bytes


@dataclass(frozen=True)
class PartOfRows(TiledMatrix):
    """`count` rows in tiles of a matrix of n_rows, between whose other outputs theirs go."""

    count: int = 0

    @property
    def tile_rows(self) -> int:
        """Tile rows that there are."""
        return -(-self.count // ROWS)


def can_be_halves(k: int) -> bool:
    """Whether the products take rows of k columns as tiles of halves."""
    return k % 8 == 0


def scratch_bytes(
    matrices: Iterable[tuple[Format, int, int]],
    gemm: Gemm,
    keeps_blocks: Callable[[Format], bool] = lambda format: False,
) -> int:
    """The most that the halves of a model's (format, rows, columns) take: of three matrices that
    share an x, and no more than SCRATCH where they can be cut. keeps_blocks: of formats with tiles.
    """
    most = 0
    for format, n_rows, k in matrices:
        in_blocks = layout_of(format, k) is None or keeps_blocks(format)
        if gemm == "cublas" and can_be_halves(k):
            most = max(most, min(SCRATCH, 2 * n_rows * k))
        elif gemm == "auto" and in_blocks and can_be_halves(k):
            nbytes = TILES.nbytes(n_rows, k)
            most = max(most, nbytes if n_rows % ROWS else min(SCRATCH, 3 * nbytes))
    return most


def pieces(n_rows: int, row_bytes: int, unit: int = ROWS) -> Iterator[tuple[int, int]]:
    """(first row, rows) of pieces of at most SCRATCH bytes, of a multiple of `unit` rows each."""
    at_once = max(unit, SCRATCH // row_bytes // unit * unit)
    for first in range(0, n_rows, at_once):
        yield first, min(at_once, n_rows - first)


class HalfTiles:
    """Makes tiles of halves of matrices in blocks."""

    def __init__(self, device: Any, room: Room) -> None:
        self.device, self._room = device, room

    @staticmethod
    def fit(weights: list[Matrix]) -> bool:
        """Whether all of them fit into the scratch at the same time."""
        return sum(TILES.nbytes(w.n_rows, w.k) for w in weights) <= SCRATCH

    def make(self, weights: list[Matrix]) -> list[TiledMatrix]:
        """Enqueue all of them, side by side."""
        sizes = [TILES.nbytes(w.n_rows, w.k) for w in weights]
        scratch, at = self._room(NAME, sum(sizes)), 0
        made = []
        for w, nbytes in zip(weights, sizes, strict=True):
            made.append(halve_to_tiles(self.device, w.in_blocks, scratch.at(at)))
            at += nbytes
        return made

    def parts(self, w: Matrix, out: Array) -> Iterator[tuple[TiledMatrix, Array]]:
        """Enqueue piece after piece of w, each with its place in out[T, n_rows]; whoever takes one
        enqueues its product before the next.
        """
        row_bytes = TILES.nbytes(ROWS, w.k) // ROWS
        # The last rows of a tile that is not full would be written behind the others of a token.
        cuts = [(0, w.n_rows)] if w.n_rows % ROWS else pieces(w.n_rows, row_bytes)
        for first, count in cuts:
            scratch = self._room(NAME, TILES.nbytes(count, w.k))
            halve_to_tiles(self.device, blocks_from(w.in_blocks, first, count), scratch)
            yield PartOfRows(TILES, w.n_rows, w.k, scratch, count=count), columns_of(out, first)


def blocks_from(w: BlockMatrix, first: int, count: int) -> BlockMatrix:
    """Rows first ... first + count - 1."""
    at = offset(w.data, first * w.format.row_bytes(w.columns))
    return BlockMatrix(w.format, count, w.columns, at)


def columns_of(out: Array, first: int) -> Array:
    """out from column `first` on; its rows are as far apart as before."""
    return replace(out, data=offset(out.data, first * np.dtype(out.dtype).itemsize))


class HalfRows:
    """Makes rows of halves of any matrix."""

    def __init__(self, device: Any, room: Room) -> None:
        self.device, self._room = device, room
        self._from_tiles = DequantizeTile(device)

    def parts(self, w: Matrix) -> Iterator[tuple[Buffer, int, int]]:
        """Enqueue piece after piece: half [rows][k], the first row and how many they are."""
        for first, count in pieces(w.n_rows, 2 * w.k):
            scratch = self._room(NAME, 2 * count * w.k)
            if w.tiles is None:
                halve_to_rows(self.device, blocks_from(w.in_blocks, first, count), scratch)
            else:
                layout = w.tiles.layout
                at = offset(w.tiles.data, layout.nbytes(first, w.k))
                self._from_tiles.launch(TiledMatrix(layout, count, w.k, at), scratch)
            yield scratch, first, count
