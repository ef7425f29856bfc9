"""The ops in float32 numpy: their specification, and a backend for machines without a GPU.

The code is readable rather than fast, but weights are dequantised once, as far as memory allows.
Each kind of layer has its own module. Nothing here knows the names in a model file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ...gguf import Tensor
from ...sampling import Sampler
from .. import host
from ..inputs import LayerInputs
from ..interface import (
    ActivationType,
    CacheGroup,
    CacheShape,
    Demand,
    FeedForward,
    GatedDeltaNet,
    Head,
    Layer,
    MoE,
    Norm,
    Probe,
    Recurrent,
    Role,
    Step,
)
from . import attention, delta, dense, layer_inputs, moe
from .delta import GroupStates
from .functions import normalised, soft_capped
from .kv_pages import GroupPages, check_memory
from .matrix import HostMatrix, dequantized

MEMORY_RESERVE = 512 << 20  # bytes left to the KV cache, activations and the rest of the machine

Note = Callable[[str], None]


class Reference:
    """Ops on the CPU. note: gets a remark if weights do not fit in memory as float32.

    weight_memory: the most bytes of float32 weights; by default the free memory of the machine.
    """

    name = "cpu"
    activations: str = "f32"
    asynchronous = False

    def __init__(
        self,
        n_threads: int | None = None,
        *,
        reason: str = "numpy on the CPU",
        note: Note = lambda message: None,
        weight_memory: int | None = None,
    ) -> None:
        self.reason = reason
        self._note = note
        self.n_threads = host.checked_threads(n_threads or host.default_threads(), note)
        host.set_blas_threads(self.n_threads)
        self._budget = _default_budget() if weight_memory is None else weight_memory
        self._in_blocks = 0  # bytes of float32 that did not fit
        self._sampled = np.zeros(0, np.int64)
        self._cache: list[GroupPages | GroupStates] = []
        self._probe: Probe = _unobserved

    # Weights

    def weight(
        self,
        tensor: Tensor,
        role: Role,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> HostMatrix | F32:
        """A vector as an array; a matrix as float32, or in blocks if it is too large or only rows
        are read.
        """
        if len(tensor.shape) == 1:
            return np.array(tensor.dequantize(), np.float32)
        by_row = None if scale is None else np.array(scale.dequantize(), np.float32)
        if role.lookup:
            return HostMatrix(tensor, None, by_row)
        nbytes = 4 * int(np.prod(tensor.shape))
        if nbytes > self._budget:
            self._in_blocks += nbytes
            return HostMatrix(tensor, None, by_row, activations)
        self._budget -= nbytes
        return HostMatrix(tensor, dequantized(tensor), by_row, activations)

    def weights_ready(self) -> None:
        """Tell the user if some weights stayed in blocks."""
        if self._in_blocks:
            self._note(
                f"{_gigabytes(self._in_blocks)} of the weights do not fit in memory as float32: "
                "they stay in blocks and are dequantised at each use, which is slow"
            )

    def plan_memory(self, demand: Demand) -> int:
        """The least batch, because a larger one is not faster. Only the KV cache can be too large,
        because weights that do not fit stay in the file.
        """
        check_memory(demand.cache(demand.least_batch))
        host.release_free_memory()  # of what read the file's metadata
        return demand.least_batch

    def allocate_cache(self, shape: CacheShape) -> None:
        """Allocate zeroed pages, which take memory when they are written."""
        check_memory(shape)
        self._cache = [_memory_of(group) for group in shape.groups]

    def clear_pages(self, group: int, pages: Sequence[int]) -> None:
        """Does nothing, because positions are not read before they are written."""

    # Steps

    def run(self, step: Step, forward: Callable[[Step], F32], probe: Probe | None = None) -> F32:
        """Returns forward(step)."""
        self._probe = probe or _unobserved
        return forward(step)

    def embed(
        self, step: Step, table: HostMatrix, scale: float = 1.0, norm: Norm | None = None
    ) -> F32:
        """x[T, D] = norm(table[ids] * scale)."""
        x = table.rows(self._ids(step)) * np.float32(scale)
        return x if norm is None else normalised(x, norm)

    def layer_inputs(self, x: F32, inputs: LayerInputs, step: Step) -> F32:
        """p[T, L, I], the inputs of all layers."""
        return layer_inputs.layer_inputs(x, inputs, self._ids(step))

    def mix(self, x: F32, layer: Layer, step: Step) -> F32:
        """x[T, D] plus the output of layer.mixer, and of layer.ffn if the layer is parallel."""
        mixer, probe = layer.mixer, partial(self._probe, layer.index)
        memory = self._memory(mixer.group)
        if isinstance(mixer, GatedDeltaNet):
            assert isinstance(memory, GroupStates)
            y = delta.mix(x, mixer, step, memory, probe)
        else:
            assert isinstance(memory, GroupPages)
            y = attention.mix(x, mixer, step, memory, probe)
        if layer.parallel and layer.ffn is not None:
            return _feed_forward(y, layer.ffn, probe, of=x)
        return y

    def feed_forward(self, x: F32, layer: Layer, step: Step) -> F32:
        """x[T, D] plus the output of layer.ffn."""
        assert layer.ffn is not None
        return _feed_forward(x, layer.ffn, partial(self._probe, layer.index))

    def end_layer(self, x: F32, layer: Layer, inputs: F32 | None, step: Step) -> F32:
        """(x[T, D] plus the output of layer.input) * layer.scale."""
        return layer_inputs.end_layer(x, layer, inputs, partial(self._probe, layer.index))

    def logits(self, x: F32, head: Head, step: Step) -> F32:
        """l[R, V] of step.rows."""
        y = head.weight.multiply(normalised(x[step.rows], head.norm))
        return soft_capped(y if head.scale == 1 else y * np.float32(head.scale), head.soft_cap)

    def sample(self, logits: F32, samplers: Sequence[Sampler]) -> NDArray[np.int64]:
        """ids[R]: samplers[r] draws from row r, and counts the draw."""
        for sampler in samplers:
            sampler.settle(self._sampled)
        pairs = zip(samplers, logits, strict=True)
        ids = np.array([sampler.try_sample(row) for sampler, row in pairs], np.int64)
        self._sampled = np.maximum(ids, 0)  # the next step needs some id for rows without a token
        return ids

    def read(self, array: NDArray, row: int | None = None) -> NDArray:
        """The array itself, or one row."""
        return array if row is None else array[row]

    def rehearsal(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def device_bytes(self) -> int:
        """Always 0: all memory is the process's own."""
        return 0

    def _ids(self, step: Step) -> NDArray[np.int64]:
        """The ids [T] of a step, with each ~r replaced by the id that was sampled at row r."""
        ids = step.ids.astype(np.int64)
        late = ids < 0
        ids[late] = self._sampled[~ids[late]]
        return ids

    def _memory(self, group: int) -> GroupPages | GroupStates:
        if not self._cache:
            raise RuntimeError("allocate_cache comes before the first step")
        return self._cache[group]


def _memory_of(group: CacheGroup) -> GroupPages | GroupStates:
    return GroupStates(group) if isinstance(group.spec, Recurrent) else GroupPages(group)


def _feed_forward(
    x: F32, ffn: FeedForward, probe: Callable[[str, NDArray], None], of: F32 | None = None
) -> F32:
    """x plus the output of a feed-forward for norm(of), or for norm(x)."""
    if isinstance(ffn, MoE):
        return moe.feed_forward(x, ffn, probe, of)
    return dense.feed_forward(x, ffn, probe, of)


def _unobserved(layer: int, name: str, array: F32) -> None:
    """The probe of a step without a probe."""


def _default_budget() -> int:
    free = host.available_memory()
    return 1 << 62 if free is None else max(0, free - MEMORY_RESERVE)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
