"""Uploads weights from the memory-mapped file to the GPU.

A part of the file is copied through page-locked memory and repacked while the next part is read.
Nothing here depends on the role of a weight, or on the layout of tiles.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, Ptr
from ...formats import Format, by_name
from ...gguf import Tensor
from ...kernels.layout.tile import ROWS, Layout, TiledMatrix, layout_of, repack
from .. import host

PART = 32 << 20  # bytes of a part
PARTS = 2  # parts in flight
WORTH_THREADS = 1 << 20  # parts of so many bytes and more are copied by several threads
# threads that copy a part: a single thread reads a mapped file at a third of the bus's speed
COPIERS = 4


def in_f32(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """The matrix in float32, times its row scales."""
    values = np.ascontiguousarray(tensor.dequantize(), np.float32)
    if scale is not None:
        values = values * scale.dequantize()[:, None]
    data = values.view(np.uint8).reshape(*tensor.shape[:-1], -1)
    return replace(tensor, format=by_name("F32"), data=data)


class Uploader:
    """Uploads tensors. Repack kernels run after the copies on the same stream."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._pinned = [device.pinned(PART) for _ in range(PARTS)]
        self._copiers = ThreadPoolExecutor(COPIERS)
        self._raw: list[Buffer] = []
        self._tiles: Buffer | None = None
        self._done: list[Any] = [None] * PARTS
        self._next = 0

    def upload(
        self, tensor: Tensor, tiled: bool, on_host: bool = False
    ) -> tuple[TiledMatrix | None, Buffer | None]:
        """Returns (the matrix in tiles, None), or (None, its blocks) if not `tiled` or if its
        format has no tiles. on_host: the tiles or blocks are kept in host memory; tiles are still
        made on the device.
        """
        n_rows, k = tensor.shape[-2:]
        layout = layout_of(tensor.format, k) if tiled else None
        if layout is None:
            return None, self._to_host(tensor) if on_host else self._copy_blocks(tensor)
        # all experts, or a single matrix
        matrices = tensor.data.reshape(-1, n_rows, tensor.data.shape[-1])
        nbytes = layout.nbytes(n_rows, k)
        alloc = self.device.alloc_host if on_host else self.device.alloc
        out = alloc(len(matrices) * nbytes, tensor.name)
        repack_into = self._repack_on_host if on_host else self._repack
        for i, rows in enumerate(matrices):
            repack_into(tensor.format, layout, rows, k, out.at(i * nbytes))
        host.drop_pages(tensor.data)
        return TiledMatrix(layout, n_rows, k, out), None

    def _repack(
        self, format: Format, layout: Layout, matrix: NDArray[np.uint8], k: int, out: Ptr
    ) -> None:
        """Repacks a matrix of blocks into tiles, part by part."""
        rows_at_once = max(ROWS, PART // matrix.shape[1] // ROWS * ROWS)
        for start in range(0, len(matrix), rows_at_once):
            rows = matrix[start : start + rows_at_once]
            raw = self._send(rows)
            dst = out + layout.nbytes(start, k)
            repack(self.device, format, raw, len(rows), k, dst)
            self._done[(self._next - 1) % PARTS] = self.device.event().record()

    def _repack_on_host(
        self, format: Format, layout: Layout, matrix: NDArray[np.uint8], k: int, out: Ptr
    ) -> None:
        """Repacks a matrix as `_repack` does, and copies its tiles into host memory."""
        row_bytes = -(-layout.nbytes(ROWS, k) // ROWS)
        rows_at_once = max(ROWS, PART // max(row_bytes, matrix.shape[1]) // ROWS * ROWS)
        nbytes = layout.nbytes(min(rows_at_once, len(matrix)), k)
        if self._tiles is None or self._tiles.nbytes < nbytes:
            self.device.synchronize()
            self._tiles = self.device.alloc(nbytes, "tiles for the host")
        for start in range(0, len(matrix), rows_at_once):
            rows = matrix[start : start + rows_at_once]
            self._repack(format, layout, rows, k, self._tiles.at(0))
            to = out + layout.nbytes(start, k)
            self.device.copy(to, self._tiles, layout.nbytes(len(rows), k))

    def _copy_blocks(self, tensor: Tensor) -> Buffer:
        buffer = self.device.alloc(tensor.nbytes, tensor.name)
        flat = tensor.data.reshape(-1)
        for start in range(0, flat.size, PART):
            part = flat[start : start + PART]
            self._copy(part, buffer.at(start))
        host.drop_pages(tensor.data)
        return buffer

    def _to_host(self, tensor: Tensor) -> Buffer:
        """Copies the blocks to page-locked host memory, which kernels can read."""
        buffer: Buffer = self.device.alloc_host(tensor.nbytes, tensor.name)
        flat = tensor.data.reshape(-1)
        for start in range(0, flat.size, PART):
            part = flat[start : start + PART]
            self.device.copy(buffer.at(start), self._send(part), part.size)
        host.drop_pages(tensor.data)
        return buffer

    def _send(self, rows: NDArray[np.uint8]) -> Buffer:
        """Copies the rows' bytes into one of PARTS device buffers, used alternately."""
        if not self._raw:
            self._raw = [self.device.alloc(PART, "blocks to repack") for _ in range(PARTS)]
        slot = self._next % PARTS
        if self._raw[slot].nbytes < rows.size:
            self.device.synchronize()
            self._raw[slot] = self.device.alloc(rows.size, "blocks to repack")
        raw = self._raw[slot]
        self._copy(rows.reshape(-1), raw)
        return raw

    def _copy(self, part: NDArray[np.uint8], to: Buffer | Ptr) -> None:
        """Copies through page-locked memory, once the last copy from that memory has completed."""
        slot = self._next % PARTS
        self._next += 1
        if self._done[slot] is not None:
            self._done[slot].synchronize()
        if self._pinned[slot].size < part.size:
            self._pinned[slot] = self.device.pinned(part.size)
        staged = self._pinned[slot][: part.size]
        n = COPIERS if part.size >= WORTH_THREADS else 1
        list(self._copiers.map(np.copyto, np.array_split(staged, n), np.array_split(part, n)))
        self.device.upload(to, staged)
        self._done[slot] = self.device.event().record()
