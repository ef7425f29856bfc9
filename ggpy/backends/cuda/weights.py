"""Weights from the memory-mapped file to the GPU: copied through pinned memory and repacked, both
while the next part of the file is read. Knows neither what a weight is for nor how tiles look.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer, Ptr
from ...gguf import Tensor
from ...kernels.layout.tile import ROWS, TiledMatrix, layout_of, repack
from .. import host

PART = 32 << 20  # bytes of a part
PARTS = 2  # under way
WORTH_THREADS = 1 << 20  # bytes
COPIERS = 4  # threads that copy a part: one alone reads a mapped file at a third of the bus's speed


class Uploader:
    """Uploads tensors; the kernels that repack run behind the copies on the same stream."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._pinned = [device.pinned(PART) for _ in range(PARTS)]
        self._copiers = ThreadPoolExecutor(COPIERS)
        self._raw: list[Buffer] = []
        self._done: list[Any] = [None] * PARTS
        self._next = 0

    def upload(self, tensor: Tensor, tiled: bool) -> tuple[TiledMatrix | None, Buffer | None]:
        """(the matrix in tiles, None), or (None, its blocks) where it is not to be tiled or has no
        tiles.
        """
        n_rows, k = tensor.shape
        layout = layout_of(tensor.format, k) if tiled else None
        if layout is None:
            return None, self._copy_blocks(tensor)
        out = self.device.alloc(layout.nbytes(n_rows, k), tensor.name)
        row_bytes = tensor.data.shape[1]
        rows_at_once = max(ROWS, PART // row_bytes // ROWS * ROWS)
        for start in range(0, n_rows, rows_at_once):
            rows = tensor.data[start : start + rows_at_once]
            raw = self._send(rows)
            to = out.at(layout.nbytes(start, k))
            repack(self.device, tensor.format, raw, len(rows), k, to)
            self._done[(self._next - 1) % PARTS] = self.device.event().record()
        host.drop_pages(tensor.data)
        return TiledMatrix(layout, n_rows, k, out), None

    def _copy_blocks(self, tensor: Tensor) -> Buffer:
        buffer = self.device.alloc(tensor.nbytes, tensor.name)
        flat = tensor.data.reshape(-1)
        for start in range(0, flat.size, PART):
            part = flat[start : start + PART]
            self._copy(part, buffer.at(start))
        host.drop_pages(tensor.data)
        return buffer

    def _send(self, rows: NDArray[np.uint8]) -> Buffer:
        """The rows' bytes in device memory that the parts take turns in."""
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
        """Through pinned memory whose last copy is done, and on."""
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
