"""Workers of which a GPU does what it has kernels for: the same bytes, many times as fast.

Rows go through pinned memory in the type that they have, blocks come back; several threads do that
at the same time, so that reading, copies both ways, kernels and whoever writes the blocks overlap.
What no kernel is for, and rows with what is no number, are done by the CPU. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from ..backends import choose_gpu, gpu_name
from ..formats import Format
from ..formats.base import U8, checked_importance
from ..kernels.blocks.block_kernel import BlockMatrix, supported_formats
from ..kernels.quantize.quantize import FLAG_BYTES, Quantizer, has_kernel
from .workers import SLAB, Task, Workers, requantized

PARTS = 4  # under way
ALIGNMENT = 256  # bytes


def open_workers(
    device: str, n: int | None, note: Callable[[str], None], targets: Iterable[Format]
) -> Workers:
    """Workers for blocks of these formats, on "auto", "cpu", "cuda" or "cuda:N"; ValueError.

    note: gets which device that is and why, and other remarks.
    """
    gpu, reason = None, "no kernel makes these types"
    if device != "auto" or any(map(has_kernel, set(targets))):
        gpu, reason = choose_gpu(device, note)
    if gpu is None:
        note(f"device: cpu ({reason})")
        return Workers(n)
    note(f"device: {gpu_name(device)} ({reason})")
    return DeviceWorkers(gpu, n)


class DeviceWorkers(Workers):
    """`n` workers of the CPU, by default one for each core, and a device; use them in a `with`."""

    def __init__(self, device: Any, n: int | None = None) -> None:
        super().__init__(n)
        self.device = device
        self.ahead = max(self.ahead, 2 * PARTS)
        self.search_slab = SLAB  # what takes long on a core does not here
        self._feeders = ThreadPoolExecutor(PARTS)
        self._parts: SimpleQueue[RowsPart] = SimpleQueue()
        self._alone = Lock()  # threads take turns at the device, and wait for it side by side
        for _ in range(PARTS):
            self._parts.put(RowsPart(device, self._alone))
        self._quantizers: dict[tuple[str, str, bool], Quantizer | None] = {}

    def close(self) -> None:
        self._feeders.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _submit(self, task: Task) -> Future[U8]:
        quantizer = self._quantizer(task)
        if quantizer is None:
            return super()._submit(task)
        return self._feeders.submit(self._quantize, task, quantizer)

    def _quantizer(self, task: Task) -> Quantizer | None:
        """What makes such blocks, if there is a kernel for it."""
        if task.source is task.target or task.scales is not None:
            return None
        weighted = task.importance is not None and task.target.quantize_weighted is not None
        key = task.source.name, task.target.name, weighted
        if key not in self._quantizers:
            can = has_kernel(task.target) and task.source in supported_formats()
            with self._alone:
                self._quantizers[key] = (
                    Quantizer(self.device, task.target, task.source, weighted) if can else None
                )
        return self._quantizers[key]

    def _quantize(self, task: Task, quantizer: Quantizer) -> U8:
        part = self._parts.get()
        try:
            blocks = part.quantize(task, quantizer)
        finally:
            self._parts.put(part)
        return requantized(task) if blocks is None else blocks


class RowsPart:
    """Memory on both sides, and a stream, for one task at a time."""

    def __init__(self, device: Any, alone: Lock) -> None:
        self.device, self.alone = device, alone
        self.stream = device.new_stream()
        self._pinned: dict[str, U8] = {}
        self._buffers: dict[str, Any] = {}

    def quantize(self, task: Task, quantizer: Quantizer) -> U8 | None:
        """The task's blocks; None where numpy has to say what is wrong. ValueError."""
        rows, columns = len(task.data), task.data.shape[1] // task.source.nbytes
        columns *= task.source.block_size
        row_bytes = task.target.row_bytes(columns)
        importance = np.zeros(0, np.float32)
        if task.importance is not None:
            importance = np.ascontiguousarray(checked_importance(task.importance, columns))
        # What is uploaded: the flag, importance, weights; and room for a number for each row.
        start = _aligned(FLAG_BYTES)
        data = start + _aligned(importance.nbytes)
        squares = data + _aligned(task.data.size)
        flag = _aligned(rows * row_bytes)  # where it comes back, after the blocks
        with self.alone:
            host, to = self._room("weights", squares + 4 * rows)
            back, out = self._room("blocks", flag + FLAG_BYTES)
        host[:start] = 0
        host[start : start + importance.nbytes] = importance.view(np.uint8)
        host[data : data + task.data.size].reshape(task.data.shape)[:] = task.data
        with self.alone:
            self.device.upload(to, host[: data + task.data.size], stream=self.stream)
            weights = BlockMatrix(task.source, rows, columns, to.at(data))
            given = to.at(start), to.at(squares)
            quantizer.launch(weights, out, to, *given, stream=self.stream)
            blocks, strange = back[: rows * row_bytes], back[flag : flag + FLAG_BYTES]
            self.device.download_into(blocks, out, stream=self.stream)
            self.device.download_into(strange, to, stream=self.stream)
        self.stream.synchronize()
        return None if strange.any() else blocks.reshape(rows, row_bytes).copy()

    def _room(self, name: str, nbytes: int) -> tuple[U8, Any]:
        """So much pinned memory, and of the device."""
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers[name] = self.device.alloc(nbytes, f"{name} to quantise")
            self._pinned[name] = self.device.pinned(nbytes)
        return self._pinned[name], self._buffers[name]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
