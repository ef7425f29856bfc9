"""A device whose kernels do nothing but take a known time, without a GPU.

A measurement on this device must find exactly the times that the test chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from counting_device import CountingDevice

from ggpy.device.cubin import Resources

COPY, START = 2.0, 5.0  # microseconds of a copy, and of the start of a graph


class TimedDevice(CountingDevice):
    """Kernels take `cost(name)` microseconds."""

    def __init__(self, cost: Callable[[str], float], total: int = 1 << 40) -> None:
        super().__init__(total)
        self.cost, self.now = cost, 0.0
        self.gpu = SimpleNamespace(
            name="A GPU", l2_bytes=1 << 20, driver="13.0", ordinal=0, sm_count=self.sm_count
        )
        self._graph: TimedGraph | None = None

    def spend(self, us: float) -> None:
        """Advance the clock by `us`, or during capture when the graph is launched."""
        if self._graph is not None:
            self._graph.us += us
        else:
            self.now += us

    def kernel(self, source: str, name: str, **options: Any) -> Any:
        return self.kernels(source, [name], **options)[0]

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[Any]:
        return [TimedKernel(self, name) for name in names]

    def upload(self, *_: Any, stream: Any = None, **__: Any) -> None:
        if stream is None:
            self.spend(COPY)

    copy = fill = upload

    def event(self, timing: bool = False) -> Any:
        return TimedEvent(self)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        self._graph = graph = TimedGraph(self)
        try:
            yield graph
        finally:
            self._graph = None


class TimedKernel:
    def __init__(self, device: TimedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.resources = Resources(40, 0, 0, 0, 1000)

    def launch(self, grid: Any, threads: Any, args: Any, **options: Any) -> None:
        self.device.spend(self.device.cost(self.name))


class TimedGraph:
    def __init__(self, device: TimedDevice) -> None:
        self.device, self.us = device, START

    def launch(self, stream: Any = None) -> None:
        self.device.now += self.us

    def close(self) -> None:
        pass


class TimedEvent:
    def __init__(self, device: TimedDevice) -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: Any = None) -> TimedEvent:
        self.at = self.device.now
        return self

    def synchronize(self) -> None:
        pass

    def elapsed_ms(self, start: TimedEvent) -> float:
        return (self.at - start.at) / 1e3
