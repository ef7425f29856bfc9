"""A device that wraps another one and notes the operations that are enqueued, so that they can be
enqueued again.

Kernel wrappers and ops run on it unchanged. The operations of a recorded graph are noted when the
graph is launched, as if they were enqueued one by one. Nothing here measures time or knows models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Operation:
    """A launch of a kernel, or a copy ("upload", "download", "copy", "fill", without a kernel), in
    the device's own stream.
    """

    name: str
    op: str  # the op that it is a part of: see ObservedDevice.part_of
    kernel: Any
    shared: int  # bytes of dynamic shared memory
    enqueue: Callable[[], None] = field(repr=False, compare=False)


class ObservedKernel:
    """A kernel of an observed device."""

    def __init__(self, device: ObservedDevice, kernel: Any) -> None:
        self._device, self._kernel = device, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def launch(self, grid: Any, threads: Any, args: Sequence[Any], **options: Any) -> None:
        """See ggpy.device.base.Kernel."""
        kernel = self._kernel
        kernel.launch(grid, threads, args, **options)
        if self._device.noting:
            kept = [_snapshot(arg) for arg in args]

            def again() -> None:
                kernel.launch(grid, threads, kept, **options)

            self._device.note(kernel.name, kernel, options.get("smem", 0), again)


class ObservedGraph:
    """A recorded graph, and the operations in it."""

    def __init__(self, device: ObservedDevice, graph: Any) -> None:
        self._device, self._graph = device, graph
        self.operations: list[Operation] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def launch(self, stream: Any = None) -> None:
        """Enqueues the graph's operations."""
        self._graph.launch(stream)
        if self._device.observing:
            self._device.operations += self.operations


class ObservedDevice:
    """Wraps a device; while `observing`, operations in its stream are appended to `operations`."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.observing = False
        self.operations: list[Operation] = []
        self._recording: ObservedGraph | None = None
        self._op = ""
        self._kernels: dict[int, ObservedKernel] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    @property
    def noting(self) -> bool:
        """Whether an operation is noted now, here or in the graph that is being recorded."""
        return self.observing or self._recording is not None

    def note(self, name: str, kernel: Any, shared: int, enqueue: Callable[[], None]) -> None:
        """Notes an operation that was enqueued. shared: bytes of dynamic shared memory."""
        if self.noting:
            to = self._recording.operations if self._recording else self.operations
            to.append(Operation(name, self._op, kernel, shared, enqueue))

    @contextmanager
    def part_of(self, op: str) -> Iterator[None]:
        """A context in which all enqueued operations belong to `op`."""
        before, self._op = self._op, op
        try:
            yield
        finally:
            self._op = before

    @contextmanager
    def capture(self) -> Iterator[ObservedGraph]:
        """See ggpy.device.gpu.CudaDevice."""
        with self.device.capture() as graph:
            self._recording = ObservedGraph(self, graph)
            try:
                yield self._recording
            finally:
                self._recording = None

    def kernel(self, source: str, name: str, **options: Any) -> ObservedKernel:
        """See ggpy.device.base.Device."""
        return self.kernels(source, [name], **options)[0]

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[ObservedKernel]:
        """See ggpy.device.base.Device."""
        found = self.device.kernels(source, names, **options)
        return [self._kernels.setdefault(id(k), ObservedKernel(self, k)) for k in found]

    def upload(self, *args: Any, **options: Any) -> None:
        """See ggpy.device.base.Device."""
        self._copy("upload", self.device.upload, args, options)

    def download_into(self, *args: Any, **options: Any) -> None:
        """See ggpy.device.gpu.CudaDevice."""
        self._copy("download", self.device.download_into, args, options)

    def copy(self, *args: Any, **options: Any) -> None:
        """See ggpy.device.gpu.CudaDevice."""
        self._copy("copy", self.device.copy, args, options)

    def fill(self, *args: Any, **options: Any) -> None:
        """See ggpy.device.gpu.CudaDevice."""
        self._copy("fill", self.device.fill, args, options)

    def _copy(self, name: str, call: Callable[..., None], args: Any, options: Any) -> None:
        call(*args, **options)
        if options.get("stream") is None:
            self.note(name, None, 0, lambda: call(*args, **options))


def _snapshot(argument: Any) -> Any:
    """A copy of a structure, because wrappers fill the same one for every launch."""
    if isinstance(argument, ctypes.Structure):
        return type(argument).from_buffer_copy(argument)
    return argument
