"""Ops that record what they compute, so that two backends are compared op by op.

A trace wraps any backend and knows nothing about how it computes. Every output is copied to the
host, so this is for finding errors and not for use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import Tensor
from ..sampling import Sampler
from .interface import (
    ActivationType,
    Array,
    Attention,
    CacheShape,
    Demand,
    FeedForward,
    Head,
    Norm,
    Ops,
    Step,
    Weight,
)


@dataclass(frozen=True)
class Record:
    """One op's output; layer -1 is before the first, n_layer after the last."""

    layer: int
    op: str
    output: NDArray


class Trace:
    """A backend that keeps a `records` list of all that another one returns."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.name, self.reason = ops.name, ops.reason
        self.asynchronous = False  # every output is waited for
        self.records: list[Record] = []
        self._layer = -1

    def check_room(self, demand: Demand) -> int:
        return self._ops.check_room(demand)

    def weight(
        self,
        tensor: Tensor,
        lookup: bool = False,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        return self._ops.weight(tensor, lookup, scale, activations)

    def weights_ready(self) -> None:
        self._ops.weights_ready()

    def allocate_cache(self, shape: CacheShape) -> None:
        self._ops.allocate_cache(shape)

    def clear_pages(self, pages: Sequence[int]) -> None:
        self._ops.clear_pages(pages)

    def run(self, step: Step, forward: Callable[[Step], Array], repeat: bool = True) -> Array:
        """forward(step), op by op: a repeated graph would hide its parts."""
        return self._ops.run(step, forward, repeat=False)

    def embed(self, step: Step, table: Weight, scale: float = 1.0) -> Array:
        self._layer = -1
        return self._record("embed", self._ops.embed(step, table, scale))

    def qkv(self, x: Array, attention: Attention, step: Step) -> Array:
        self._layer = attention.layer
        return self._record("qkv", self._ops.qkv(x, attention, step))

    def attend(self, q: Array, attention: Attention, step: Step) -> Array:
        return self._record("attend", self._ops.attend(q, attention, step))

    def linear_add(
        self,
        h: Array,
        w: Weight,
        x: Array,
        post_norm: Norm | None = None,
        then: Attention | FeedForward | None = None,
    ) -> Array:
        return self._record("linear_add", self._ops.linear_add(h, w, x, post_norm, then))

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        return self._record("ffn", self._ops.ffn(x, feed_forward, step))

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        self._layer += 1
        return self._record("logits", self._ops.logits(x, head, step))

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        return self._record("sample", self._ops.sample(logits, samplers))

    def read(self, array: Array) -> NDArray:
        return self._ops.read(array)

    def device_bytes(self) -> int:
        return self._ops.device_bytes()

    def _record(self, op: str, output: Any) -> Any:
        self.records.append(Record(self._layer, op, np.array(self._ops.read(output))))
        return output


@dataclass(frozen=True)
class Difference:
    """Where two traces part: the largest error relative to the output's largest value."""

    index: int
    layer: int
    op: str
    error: float


def errors(ours: Sequence[Record], theirs: Sequence[Record]) -> list[Difference]:
    """The error of every op; ValueError when the traces are not of the same ops."""
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
    """The first op whose error is above the tolerance, or not a number."""
    return next((d for d in errors(ours, theirs) if not d.error <= tolerance), None)


def _error(a: NDArray, b: NDArray) -> float:
    if a.size == 0:
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    scale = max(float(np.abs(x).max()), float(np.abs(y).max()), 1e-30)
    return float(np.abs(x - y).max()) / scale
