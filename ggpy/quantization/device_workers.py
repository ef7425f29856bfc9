"""Workers that quantise on a GPU where it has a kernel: the same bytes, many times as fast.

Rows are uploaded from pinned memory in their own type, and blocks are downloaded. Several threads
do this at the same time, so that reading, copies both ways, kernels and writing of blocks overlap.
The CPU quantises formats without a kernel, and rows with NaN or infinity. Knows no file.
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

PARTS = 4  # tasks on the device at the same time
ALIGNMENT = 256  # bytes


def open_workers(
    device: str, n: int | None, note: Callable[[str], None], targets: Iterable[Format]
) -> Workers:
    """Workers for blocks of the formats `targets`; n: workers of the CPU, None: one for each core.

    device: "auto", "cpu", "cuda" or "cuda:N"; ValueError if it cannot be used. note: is called with
    the chosen device and the reason, and with other remarks.
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
        self.search_slab = SLAB  # a GPU searches for scales fast enough for large tasks
        self._feeders = ThreadPoolExecutor(PARTS)
        self._parts: SimpleQueue[RowsPart] = SimpleQueue()
        self._alone = Lock()  # held while a thread enqueues work, not while it waits for the GPU
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
        """The kernel for a task, or None if the CPU has to do it."""
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
    """Pinned memory, device memory and a stream for one task at a time."""

    def __init__(self, device: Any, alone: Lock) -> None:
        self.device, self.alone = device, alone
        self.stream = device.new_stream()
        self._pinned: dict[str, U8] = {}
        self._buffers: dict[str, Any] = {}

    def quantize(self, task: Task, quantizer: Quantizer) -> U8 | None:
        """The task's blocks; None if a row has NaN or infinity, which the CPU reports.

        ValueError for importance that does not fit.
        """
        rows, columns = len(task.data), task.data.shape[1] // task.source.nbytes
        columns *= task.source.block_size
        row_bytes = task.target.row_bytes(columns)
        importance = np.zeros(0, np.float32)
        if task.importance is not None:
            importance = np.ascontiguousarray(checked_importance(task.importance, columns))
        # Device memory: flag, importance and weights, which are uploaded; one f32 for each row.
        start = _aligned(FLAG_BYTES)
        data = start + _aligned(importance.nbytes)
        squares = data + _aligned(task.data.size)
        flag = _aligned(rows * row_bytes)  # offset of the downloaded flag, after the blocks
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
        """(pinned memory, device memory) of at least `nbytes` bytes, which later calls reuse."""
        if name not in self._buffers or self._buffers[name].nbytes < nbytes:
            self._buffers[name] = self.device.alloc(nbytes, f"{name} to quantise")
            self._pinned[name] = self.device.pinned(nbytes)
        return self._pinned[name], self._buffers[name]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
