"""Measures device times of enqueued work with graphs and events: warm, medians of several runs.

The start event is recorded while the GPU still runs other work, so the time never includes the
host's time to enqueue. This module knows no kernel that it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..kernels.probe.ceilings import MATRIX_THREADS, ProbeKernels

RUNS = 9
LEAD = 400  # iterations of one CTA of matrix_rate: at least a tenth of a millisecond
RUN_US = 500.0  # target microseconds of a run, in which a short kernel is repeated
LEAST, MOST = 4, 50  # limits of the number of repetitions


@dataclass(frozen=True)
class Timing:
    """The times of several runs, in microseconds."""

    samples: Sequence[float]

    @property
    def median(self) -> float:
        """The median time, which reports show."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.samples) - min(self.samples)) / abs(self.median or 1e-9)

    @property
    def noise(self) -> float:
        """A standard deviation in microseconds that is robust against outliers (scaled MAD)."""
        middle = self.median
        return 1.4826 * median(abs(t - middle) for t in self.samples)


class Clock:
    """Measures on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._products = ProbeKernels(device)
        self._result = device.alloc(4 * MATRIX_THREADS, "products")
        twice = self.whole([self._lead] * 2).median
        self.start_us = 2 * self.whole([self._lead]).median - twice  # start time of a graph

    def _lead(self) -> None:
        """Enqueue work that does not touch memory or caches."""
        self._products.multiply(self._result, 1, LEAD)

    def each(self, enqueue: Callable[[], None], runs: int = RUNS) -> Timing:
        """The time of one call of `enqueue`, which uses other operands at each call.

        The time includes the launches. Every run records a new graph of several calls, so no
        operand is used again while it may be in a cache.
        """
        enqueue()  # compiles and allocates
        self.device.synchronize()
        once = self.whole([enqueue] * 3, 1).median - self.whole([enqueue], 1).median
        n = max(LEAST, min(MOST, int(RUN_US / max(1.0, once / 2))))
        times = [self._run_once(self.record([enqueue] * n)) for _ in range(runs)]
        return Timing([(t - self.start_us) / n for t in times])

    def _run_once(self, graph: Any) -> float:
        """Microseconds of one run of the graph, which is then freed."""
        with closing(graph):
            return self._run(graph)

    def whole(self, operations: Sequence[Callable[[], None]], runs: int = RUNS) -> Timing:
        """The time of one graph that holds all operations in sequence."""
        graph = self.record(operations)
        with closing(graph):
            self._run(graph)
            return Timing([self._run(graph) for _ in range(runs)])

    def record(self, operations: Sequence[Callable[[], None]]) -> Any:
        """Record a graph of the operations."""
        with self.device.capture() as graph:
            for operation in operations:
                operation()
        return graph

    def _run(self, graph: Any) -> float:
        """Microseconds of one run of the graph."""
        self._lead()
        start = self.device.event(timing=True).record()
        graph.launch()
        end = self.device.event(timing=True).record()
        end.synchronize()
        return 1e3 * float(end.elapsed_ms(start))
