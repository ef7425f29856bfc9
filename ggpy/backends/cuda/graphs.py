"""Steps that repeat, recorded as CUDA graphs: what launches a step's kernels costs the processor
more than the GPU takes for those of a small model.

Everything that changes between steps of one shape is in memory whose address stays, or is one of a
few places. Knows nothing of models: a step is a function that launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from .arrays import Array

RARE_KEPT = 16  # graphs of steps whose shape seldom comes again
MOST_SHAPES = 1024  # that are remembered without a graph

Key = tuple[Hashable, int]  # shape and place of a step


class Graphs:
    """Of one device; call forget() before an address changes that steps were recorded with."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._graphs: dict[Key, tuple[Any, Array]] = {}
        self._rare: dict[Key, None] = {}  # shapes that have graphs, the oldest first
        self._seen: set[Hashable] = set()

    def run(self, shape: Hashable, place: int, rare: bool, launch: Callable[[], Array]) -> Array:
        """launch(), or from the second step of a shape on what was recorded of it with this place:
        then the result is at the same address each time. rare: of such shapes the oldest graphs are
        forgotten.
        """
        key = shape, place
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.launch()
            return result
        if shape not in self._seen:
            result = launch()  # compiles and allocates what the recording must not
            if len(self._seen) >= MOST_SHAPES:
                self._seen.clear()
            self._seen.add(shape)  # now: what launch() allocates may call forget()
            return result
        if rare:
            self._make_room()
            self._rare[key] = None
        with self.device.capture() as graph:
            result = launch()
        self._graphs[key] = graph, result
        graph.launch()
        return result

    def _make_room(self) -> None:
        """For one more graph of a rare step."""
        while len(self._rare) >= RARE_KEPT:
            oldest = next(iter(self._rare))
            self.device.synchronize()
            del self._rare[oldest], self._graphs[oldest]
            self._seen.discard(oldest[0])

    def forget(self) -> None:
        """Wait for the steps under way, and record again what comes."""
        if self._graphs:
            self.device.synchronize()
        self._graphs.clear()
        self._rare.clear()
        self._seen.clear()
