"""CUDA graphs of repeated steps. They pay because the CPU takes longer to launch the kernels of a
small model's step than the GPU takes to run them.

All values that change between steps of one shape are in memory at a fixed address, or at one of a
few addresses. A step is a function that launches kernels; nothing here depends on models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..arrays import Array

KEPT = 64  # graphs; each takes one or two megabytes of host memory for a model of 30 layers
MOST_SHAPES = 1024  # shapes without a graph that are remembered
EAGER_STEPS = 2  # steps of a shape before its graph is recorded, which takes longer than these

Key = tuple[Hashable, int]  # shape of a step, and index of the memory that holds its integers


class Graphs:
    """The graphs of one device. Call forget() before an address that graphs use changes."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._graphs: dict[Key, tuple[Any, Array]] = {}  # least recently used first
        self._seen: dict[Hashable, int] = {}  # shape -> steps that ran without a graph

    def run(self, shape: Hashable, place: int, often: bool, launch: Callable[[], Array]) -> Array:
        """Calls launch() for the first EAGER_STEPS steps of a shape (1 if it comes often), and
        replays a graph from then on; the result then always has the same address. place: index of
        the memory that holds the step's integers. The KEPT most recently used graphs are kept.
        """
        key = shape, place
        if key in self._graphs:
            graph, result = self._graphs[key] = self._graphs.pop(key)
            graph.launch()
            return result
        if self._seen.get(shape, 0) < (1 if often else EAGER_STEPS):
            result = launch()  # compiles and allocates, which a capture must not do
            if len(self._seen) >= MOST_SHAPES:
                self._seen.clear()
            # after launch(), whose allocations may call forget()
            self._seen[shape] = self._seen.get(shape, 0) + 1
            return result
        if len(self._graphs) >= KEPT:
            # the driver frees a graph that still runs when it has ended
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            self._seen.pop(oldest[0], None)
        with self.device.capture() as graph:
            result = launch()
        self._graphs[key] = graph, result
        graph.launch()
        return result

    def forget(self) -> None:
        """Wait for the steps in flight and drop all graphs."""
        if self._graphs:
            self.device.synchronize()
        self._graphs.clear()
        self._seen.clear()
