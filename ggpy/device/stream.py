"""Streams, events and graphs: streams and events order work on a GPU, a graph repeats work.

Thin objects over the driver's handles; the last reference to an object destroys its handle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggpy.device.base import Buffer, CudaError

if TYPE_CHECKING:
    from ggpy.device.gpu import CudaDevice


class Stream:
    """A queue of work; work in different streams may overlap."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        non_blocking = 1  # no wait for the legacy default stream, which this program does not use
        self.handle = device.check(device.cu.cuStreamCreate(non_blocking), "making a stream")

    def synchronize(self) -> None:
        """Waits for everything enqueued in the stream; CudaError names the kernels."""
        self.device.make_current()
        self.device.check(self.device.cu.cuStreamSynchronize(self.handle), "waiting for a stream")

    def wait(self, event: Event) -> None:
        """Work that is enqueued from now on starts after the event."""
        self.device.make_current()
        self.device.check(
            self.device.cu.cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for an event"
        )

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            with contextlib.suppress(CudaError, AttributeError, TypeError):
                self.device.make_current()
                self.device.cu.cuStreamDestroy(self.handle)


class Event:
    """A mark in a stream."""

    def __init__(self, device: CudaDevice, timing: bool = False) -> None:
        self.device, self.timing = device, timing
        device.make_current()
        without_time = 2
        self.handle = device.check(
            device.cu.cuEventCreate(0 if timing else without_time), "making an event"
        )

    def record(self, stream: Stream | None = None) -> Event:
        """Sets the mark after everything enqueued in the stream so far; returns the event."""
        self.device.make_current()
        handle = (stream or self.device.stream).handle
        self.device.check(self.device.cu.cuEventRecord(self.handle, handle), "recording an event")
        return self

    def done(self) -> bool:
        """Whether the stream has reached the mark."""
        self.device.make_current()
        cu = self.device.cu
        result = cu.cuEventQuery(self.handle)
        if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self.device.check(result, "asking an event")
        return True

    def synchronize(self) -> None:
        """Waits until the stream reaches the mark; CudaError names the kernels."""
        self.device.make_current()
        self.device.check(self.device.cu.cuEventSynchronize(self.handle), "waiting for an event")

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds from `start` to this event; both need timing=True and must be reached."""
        result = self.device.cu.cuEventElapsedTime(start.handle, self.handle)
        return float(self.device.check(result, "measuring between events"))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            with contextlib.suppress(CudaError, AttributeError, TypeError):
                self.device.make_current()
                self.device.cu.cuEventDestroy(self.handle)


class Graph:
    """Work that a capture recorded, launched as one unit; the graph keeps its buffers alive."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.kernels: dict[str, None] = {}  # names, in the order of their first launch
        self._kept: dict[int, Any] = {}  # by id: each once, though most are used by many kernels
        self._executable: Any = None

    def begin(self) -> None:
        """Starts recording the device's stream."""
        cu = self.device.cu
        # Relaxed mode, so that a first use may load a kernel or allocate memory during the capture.
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.device.check(
            cu.cuStreamBeginCapture(self.device.stream.handle, mode), "starting to record a graph"
        )

    def add(self, kernel: str, buffers: Sequence[Buffer]) -> None:
        """Notes a recorded launch."""
        self.kernels[kernel] = None
        self.keep(buffers)

    def keep(self, buffers: Sequence[Buffer], array: np.ndarray | None = None) -> None:
        """Keeps what a recorded operation uses."""
        for buffer in buffers:
            if id(buffer) not in self._kept:
                buffer.pins += 1
                self._kept[id(buffer)] = buffer
        if array is not None:
            self._kept[id(array)] = array

    def end(self) -> None:
        """Stops recording and makes the graph ready to launch."""
        cu, device = self.device.cu, self.device
        graph = device.check(cu.cuStreamEndCapture(device.stream.handle), "recording a graph")
        try:
            self._executable = device.check(cu.cuGraphInstantiate(graph, 0), "preparing a graph")
        finally:
            cu.cuGraphDestroy(graph)
        device.check(cu.cuGraphUpload(self._executable, device.stream.handle), "uploading a graph")

    def abandon(self) -> None:
        """Stops recording and drops the graph."""
        result = self.device.cu.cuStreamEndCapture(self.device.stream.handle)
        if result[0] == 0:
            self.device.cu.cuGraphDestroy(result[1])
        self.close()

    def launch(self, stream: Stream | None = None) -> None:
        """Enqueues the recorded work again."""
        device = self.device
        device.make_current()
        result = device.cu.cuGraphLaunch(self._executable, (stream or device.stream).handle)
        for name in self.kernels:
            device.note(name)
        if result[0] != 0:
            raise device.error(result[0], "launching a graph")

    def close(self) -> None:
        """Destroys the graph and releases its buffers."""
        if self._executable is not None:
            self.device.cu.cuGraphExecDestroy(self._executable)
            self._executable = None
        for item in self._kept.values():
            if isinstance(item, Buffer):
                item.pins -= 1
        self._kept.clear()

    def __del__(self) -> None:
        if getattr(self, "_executable", None) is not None:
            with contextlib.suppress(CudaError, AttributeError, TypeError):
                self.device.make_current()
                self.close()
