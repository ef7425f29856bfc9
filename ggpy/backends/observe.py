"""Ops that show what goes into each matrix: what importance matrices and smoothing are made of.

Observed wraps any backend, and knows nothing about how that computes. Inputs are brought to the
host, and what an op normalises is normalised there again, in float32, so that the backend need not
give away what it has fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gguf import Tensor
from .interface import ActivationType, Array, Attention, FeedForward, Head, Norm, Ops, Step, Weight
from .numpy.backend import rms_norm
from .trace import Trace

F32 = NDArray[np.float32]
See = Callable[[str, F32], None]  # a tensor's name, and x[T, K] that is multiplied with it


class Observed(Trace):
    """A backend that calls see(name, x[T, K]) for the matrices of each product, then computes.

    Parts of a tensor that a file holds fused have its name, and are shown once.
    """

    def __init__(self, ops: Ops, see: See) -> None:
        super().__init__(ops)
        self._see = see
        # The weight is kept so that its id stays its own.
        self._tensors: dict[int, tuple[Weight, Tensor]] = {}

    def weight(
        self,
        tensor: Tensor,
        lookup: bool = False,
        scale: Tensor | None = None,
        activations: ActivationType = "f16",
    ) -> Weight:
        weight = super().weight(tensor, lookup, scale, activations)
        self._tensors[id(weight)] = weight, tensor
        return weight

    def qkv(self, x: Array, attention: Attention, step: Step) -> Array:
        self._show(self._normed(x, attention.norm), *attention.projections)
        return super().qkv(x, attention, step)

    def linear_add(
        self,
        h: Array,
        w: Weight,
        x: Array,
        post_norm: Norm | None = None,
        then: Attention | FeedForward | None = None,
    ) -> Array:
        self._show(self._host(h), w)
        return super().linear_add(h, w, x, post_norm, then)

    def ffn(self, x: Array, feed_forward: FeedForward, step: Step) -> Array:
        self._show(self._normed(x, feed_forward.norm), *feed_forward.projections)
        return super().ffn(x, feed_forward, step)

    def logits(self, x: Array, head: Head, step: Step) -> Array:
        self._show(self._normed(x, head.norm), head.weight)
        return super().logits(x, head, step)

    def _record(self, op: str, output: Any) -> Any:
        return output

    def _show(self, x: F32, *weights: Weight) -> None:
        for name in dict.fromkeys(self._tensors[id(w)][1].name for w in weights):
            self._see(name, x)

    def _host(self, x: Array) -> F32:
        values = np.asarray(self.read(x), np.float32)
        return values.reshape(len(values), -1)

    def _normed(self, x: Array, norm: Norm) -> F32:
        weight = self._tensors[id(norm.weight)][1].dequantize()
        return rms_norm(self._host(x), Norm(weight, norm.eps))
