"""Ops that forward every call to other ops: the base class of wrappers that watch a backend.

Nothing here computes or knows which backend is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from numpy.typing import NDArray

from ..gguf import Tensor
from ..sampling import Sampler
from .inputs import LayerInputs
from .interface import (
    ActivationType,
    Array,
    CacheShape,
    Demand,
    Head,
    Layer,
    Norm,
    Ops,
    Probe,
    Role,
    Step,
    Weight,
)


class Forwarding:
    """A backend that forwards to another one; subclasses override the ops that they watch."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.name, self.reason, self.asynchronous = ops.name, ops.reason, ops.asynchronous
        self.activations = ops.activations

    def plan_memory(self, demand: Demand) -> int:
        return self._ops.plan_memory(demand)

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        return self._ops.weight(tensor, role, scale, activations)

    def weights_ready(self) -> None:
        self._ops.weights_ready()

    def allocate_cache(self, shape: CacheShape) -> None:
        self._ops.allocate_cache(shape)

    def clear_pages(self, group: int, pages: Sequence[int]) -> None:
        self._ops.clear_pages(group, pages)

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        return self._ops.run(step, forward, probe)

    def embed(
        self, step: Step, table: Weight, scale: float = 1.0, norm: Norm | None = None
    ) -> Array:
        return self._ops.embed(step, table, scale, norm)

    def mix(self, x: Array, layer: Layer, step: Step) -> Array:
        return self._ops.mix(x, layer, step)

    def feed_forward(self, x: Array, layer: Layer, step: Step) -> Array:
        return self._ops.feed_forward(x, layer, step)

    def layer_inputs(self, x: Array, inputs: LayerInputs, step: Step) -> Array:
        return self._ops.layer_inputs(x, inputs, step)

    def end_layer(self, x: Array, layer: Layer, inputs: Array | None, step: Step) -> Array:
        return self._ops.end_layer(x, layer, inputs, step)

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        return self._ops.logits(x, head, step)

    def sample(self, logits: Array, samplers: Sequence[Sampler]) -> Array:
        return self._ops.sample(logits, samplers)

    def read(self, array: Array, row: int | None = None) -> NDArray[Any]:
        return self._ops.read(array, row)

    def rehearsal(self) -> AbstractContextManager[None]:
        return self._ops.rehearsal()

    def device_bytes(self) -> int:
        return self._ops.device_bytes()


def chained(first: Probe, second: Probe | None) -> Probe:
    """A probe that calls both probes."""
    if second is None:
        return first
    other = second

    def both(layer: int, name: str, array: Array) -> None:
        first(layer, name, array)
        other(layer, name, array)

    return both
