"""Ops that record their outputs, so that two backends can be compared op by op.

A trace wraps any backend, and does not depend on how it computes. Every output is copied to the
host, so a trace is for finding errors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampling import Sampler
from .forwarding import Forwarding, chained
from .interface import Array, Head, Norm, Ops, Probe, Step, Weight


@dataclass(frozen=True)
class Record:
    """The output of an op, or a value inside a layer (interface.INNER). layer is -1 before the
    first layer, and n_layer after the last.
    """

    layer: int
    op: str
    output: NDArray


class Trace(Forwarding):
    """A backend that keeps a list `records` of the outputs of another backend."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.asynchronous = False  # every output is read at once
        self.records: list[Record] = []
        self._layer = -1

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        """Runs forward(step), and records values inside its layers, too."""
        return super().run(step, forward, chained(self._record_inner, probe))

    def embed(
        self, step: Step, table: Weight, scale: float = 1.0, norm: Norm | None = None
    ) -> Array:
        self._layer = -1
        return self._record("embed", super().embed(step, table, scale, norm))

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        self._layer += 1
        return self._record("logits", super().logits(x, head, step))

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        return self._record("sample", super().sample(logits, samplers))

    def _record_inner(self, layer: int, name: str, array: Array) -> None:
        self._layer = layer
        self._record(name, array)

    def _record(self, op: str, output: Array) -> Array:
        self.records.append(Record(self._layer, op, np.array(self.read(output))))
        return output


@dataclass(frozen=True)
class Difference:
    """The difference of two traces at one op: the largest error over the largest value."""

    index: int
    layer: int
    op: str
    error: float


def errors(ours: Sequence[Record], theirs: Sequence[Record]) -> list[Difference]:
    """The error of every op; ValueError if the traces have different ops."""
    if [(r.layer, r.op, r.output.shape) for r in ours] != [
        (r.layer, r.op, r.output.shape) for r in theirs
    ]:
        raise ValueError(
            f"traces of {len(ours)} and {len(theirs)} ops that are not of the same step"
        )
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [Difference(i, a.layer, a.op, _error(a.output, b.output)) for i, (a, b) in pairs]


def first_difference(
    ours: Sequence[Record], theirs: Sequence[Record], tolerance: float
) -> Difference | None:
    """The first op whose error is above the tolerance or NaN."""
    return next((d for d in errors(ours, theirs) if not d.error <= tolerance), None)


def _error(a: NDArray, b: NDArray) -> float:
    if a.size == 0:
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    scale = max(float(np.abs(x).max()), float(np.abs(y).max()), 1e-30)
    return float(np.abs(x - y).max()) / scale
