"""Copies experts from host memory to the device, for steps that need most of them.

Matrices are copied on a separate stream, in the order in which layers use them, into SLOTS buffers
in turn: while one matrix is multiplied, the next ones are copied. This module makes no choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from ....device.base import Buffer
from ....kernels.layout.tile import TiledMatrix
from ...interface import Layer, MoE
from ..arrays import Matrix

SLOTS = 3  # gate and up are multiplied together while down is copied


class ExpertStaging:
    """The copies of a step. Call `begin` first, then `enter` at each layer with copied experts. For
    each product, call `take` before its launch and `done` after it.
    """

    def __init__(self, device: Any, scratch: Callable[[str, int], Buffer]) -> None:
        """scratch(name, bytes) returns scratch memory."""
        self.device, self._scratch = device, scratch
        self._order: list[Matrix] = []
        self._slots: list[Buffer] = []
        self._n_copied = self._n_taken = 0

    @cached_property
    def _copies(self) -> Any:
        return self.device.new_stream()

    @cached_property
    def _copied(self) -> list[Any]:
        return [self.device.event() for _ in range(SLOTS)]

    @cached_property
    def _passed(self) -> Any:
        return self.device.event()

    def begin(self) -> None:
        """Begin a step; `enter` tells its first layer."""
        self._order = []

    def enter(self, layer: Layer) -> None:
        """Start the copies of the step at its first layer with experts in host memory."""
        if self._order:
            return
        self._order, self._n_copied, self._n_taken = in_order(layer), 0, 0
        nbytes = max(w.nbytes for w in self._order)
        self._slots = [self._scratch(f"experts {i}", nbytes) for i in range(SLOTS)]
        self._copy()

    def take(self, weights: Sequence[Matrix]) -> list[TiledMatrix]:
        """The next matrices, on the device. Later launches wait for their copies."""
        return [self._take(w) if w.on_host else w.in_tiles for w in weights]

    @contextmanager
    def tiles(self, weights: Sequence[Matrix], copied: bool) -> Iterator[list[TiledMatrix]]:
        """The context of a launch; gives the matrices in tiles. copied: calls `take` and `done`."""
        if not copied:
            yield [w.in_tiles for w in weights]
            return
        yield self.take(weights)
        self.done()

    def _take(self, w: Matrix) -> TiledMatrix:
        if self._order[self._n_taken] is not w:
            raise RuntimeError("experts are taken in another order than they are copied")
        slot = self._n_taken % SLOTS
        self.device.stream.wait(self._copied[slot])
        self._n_taken += 1
        return replace(w.in_tiles, data=self._slots[slot])

    def done(self) -> None:
        """The products of all taken matrices are launched: the next matrices may be copied."""
        self._copy()

    def _copy(self) -> None:
        """Enqueue copies into the slots that are free after all launches so far have run."""
        first, end = self._n_copied, min(self._n_taken + SLOTS, len(self._order))
        if first < end:
            self._copies.wait(self._passed.record())
        for i in range(first, end):
            w, slot = self._order[i], i % SLOTS
            source = w.in_tiles.data
            self.device.copy(self._slots[slot], source, w.nbytes, stream=self._copies)
            self._copied[slot].record(self._copies)
        self._n_copied = max(first, end)


def in_order(layer: Layer | None) -> list[Matrix]:
    """The experts in host memory of this layer and of all later layers, in order."""
    found: list[Matrix] = []
    while layer is not None:
        if isinstance(layer.ffn, MoE):
            e = layer.ffn.experts
            found += [w for w in (e.w_gate, e.w_up, e.w_down) if w.on_host]
        layer = layer.next
    return found
