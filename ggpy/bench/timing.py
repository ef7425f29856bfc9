"""Times on the device of what is enqueued: graphs and events, warm, medians of several runs.

A clock is started while the GPU is still at work on something else, so that what the host takes to
enqueue is never in it. Knows nothing of which kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..kernels.probe.ceilings import MATRIX_THREADS, Ceilings

RUNS = 9
LEAD = 400  # iterations of one block's products: at least a tenth of a millisecond
RUN_US = 500.0  # of a run, about: a short kernel is repeated in it
LEAST, MOST = 4, 50  # times that it is repeated


@dataclass(frozen=True)
class Timing:
    """Microseconds of each run."""

    samples: Sequence[float]

    @property
    def median(self) -> float:
        """What is reported."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.samples) - min(self.samples)) / abs(self.median or 1e-9)

    @property
    def noise(self) -> float:
        """A standard deviation in microseconds that single outliers do not move."""
        middle = self.median
        return 1.4826 * median(abs(t - middle) for t in self.samples)


class Clock:
    """Measures on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._products = Ceilings(device)
        self._result = device.alloc(4 * MATRIX_THREADS, "products")
        twice = self.whole([self._lead] * 2).median
        self.start_us = 2 * self.whole([self._lead]).median - twice  # what a graph takes to start

    def _lead(self) -> None:
        """Enqueue work that leaves memory and caches alone."""
        self._products.multiply(self._result, 1, LEAD)

    def each(self, enqueue: Callable[[], None], runs: int = RUNS) -> Timing:
        """Of `enqueue`, its launches included, which takes other operands at each call.

        Every run is a graph of its own with several calls, so that no operand comes back soon.
        """
        enqueue()  # compiles and allocates
        self.device.synchronize()
        once = self.whole([enqueue] * 3, 1).median - self.whole([enqueue], 1).median
        n = max(LEAST, min(MOST, int(RUN_US / max(1.0, once / 2))))
        times = [self._alone(self.record([enqueue] * n)) for _ in range(runs)]
        return Timing([(t - self.start_us) / n for t in times])

    def _alone(self, graph: Any) -> float:
        with closing(graph):
            return self._run(graph)

    def whole(self, operations: Sequence[Callable[[], None]], runs: int = RUNS) -> Timing:
        """Of all operations in one graph, as they follow each other."""
        graph = self.record(operations)
        with closing(graph):
            self._run(graph)
            return Timing([self._run(graph) for _ in range(runs)])

    def record(self, operations: Sequence[Callable[[], None]]) -> Any:
        """A graph of them."""
        with self.device.capture() as graph:
            for operation in operations:
                operation()
        return graph

    def _run(self, graph: Any) -> float:
        """Microseconds of the graph."""
        self._lead()
        start = self.device.event(timing=True).record()
        graph.launch()
        end = self.device.event(timing=True).record()
        end.synchronize()
        return 1e3 * float(end.elapsed_ms(start))
