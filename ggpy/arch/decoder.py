"""The decoder: one transformer for every architecture, written once in ops.

It is built from weights that a backend holds, and runs ragged steps. Architectures differ in their
settings and in the weights that exist. Nothing here knows which machine computes, what a token
means, or how sequences are scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..backends.interface import Array, CacheShape, Head, Layer, Norm, Ops, Step, Weight
from ..cache_types import USUAL, CacheTypes
from .architecture import ModelSettings
from .cache import CacheGroups
from .config import Dimensions
from .layers.attention import AttentionSettings
from .layers.inputs import build_inputs
from .layers.weights import LayerWeights


class Decoder:
    """A model on a backend: steps in, logits or hidden states out."""

    def __init__(
        self,
        sizes: Dimensions,
        settings: ModelSettings,
        ops: Ops,
        weights: Mapping[str, Weight],
        n_batch: int,
        cache_types: CacheTypes = USUAL,
        classifier: NDArray[np.float32] | None = None,
        dense: Sequence[NDArray[np.float32]] = (),
    ) -> None:
        """n_batch: the most tokens of a step; the ops have memory for so many. classifier[C, D]:
        scores the normalised hidden state, on the host. dense: the matrices [D2, D] and [D3, D2]
        that are multiplied with a pooled hidden state, on the host; may be empty.
        """
        self.classifier, self.dense = classifier, dense
        self.sizes, self.settings, self.ops, self.n_batch = sizes, settings, ops, n_batch
        self.cache = cache_groups(sizes, settings, cache_types)
        self.table = weights["token_embd.weight"]
        self._eps = sizes.eps if settings.eps is None else settings.eps
        outside = LayerWeights(weights, "", self._eps, sizes.layer_norm)
        self.embedding_norm = Norm(None, self._eps) if settings.embedding_norm else None
        self.inputs = build_inputs(outside)
        self.head = Head(
            norm=outside.norm("output_norm"),
            weight=weights.get("output.weight", self.table),
            soft_cap=settings.soft_cap,
            scale=settings.logit_scale,
        )
        self.layers: list[Layer] = []
        for i in reversed(range(sizes.n_layer)):  # the last first: a layer refers to the next one
            self.layers.insert(0, self._layer(i, weights))

    def _layer(self, i: int, weights: Mapping[str, Weight]) -> Layer:
        w = LayerWeights(weights, f"blk.{i}.", self._eps, self.sizes.layer_norm)
        settings = self.settings.layers[i]
        return Layer(
            index=i,
            mixer=settings.mixer.build(w, *self.cache.place(i)),
            ffn=None if settings.ffn is None else settings.ffn.build(w),
            parallel=settings.parallel,
            input=None if settings.input is None else settings.input.build(w),
            scale=settings.scale,
            next=self.layers[0] if self.layers else None,
        )

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one. If False, a step has to contain whole texts, and the
        model cannot generate text.
        """
        return self.settings.causal

    def cache_shape(
        self, n_seq: int, n_ctx: int, n_batch: int, n_positions: int | None = None
    ) -> CacheShape:
        """The KV cache for n_seq sequences of n_ctx positions, which share n_positions, in steps of
        n_batch tokens. ValueError: see CacheGroups.shape.
        """
        return self.cache.shape(n_seq, n_ctx, n_batch, n_positions)

    def run(self, step: Step) -> Array:
        """Returns the logits l[R, V] of step.rows."""
        return self.ops.run(step, self.forward)

    def hidden(self, step: Step) -> Array:
        """Returns x[T, D] of all tokens after the last layer, before the final norm."""
        return self.ops.run(replace(step, hidden=True), self.residual)

    @cached_property
    def final_norm(self) -> Norm:
        """The norm before the head, with its weights on the host."""
        norm, read = self.head.norm, self.ops.read
        bias = None if norm.bias is None else read(norm.bias)
        return replace(norm, weight=read(norm.weight), bias=bias)

    def forward(self, step: Step) -> Array:
        """Calls the ops of the whole network."""
        return self.ops.logits(self.residual(step), self.head, step)

    def residual(self, step: Step) -> Array:
        """Calls the ops of the network up to the head; returns the residual stream x[T, D]."""
        ops = self.ops
        x = ops.embed(step, self.table, self.settings.embedding_scale, self.embedding_norm)
        inputs = None if self.inputs is None else ops.layer_inputs(x, self.inputs, step)
        for layer in self.layers:
            x = ops.mix(x, layer, step)
            if layer.ffn is not None and not layer.parallel:
                x = ops.feed_forward(x, layer, step)
            if layer.input is not None or layer.scale != 1:
                x = ops.end_layer(x, layer, inputs, step)
        return x


def cache_groups(sizes: Dimensions, settings: ModelSettings, types: CacheTypes) -> CacheGroups:
    """The states of a model's layers, in groups of equal specs."""
    mixers = [layer.mixer for layer in settings.layers]
    owners = {
        i: x.keys_of
        for i, x in enumerate(mixers)
        if isinstance(x, AttentionSettings) and x.keys_of is not None
    }
    pairs = zip(mixers, sizes.layers, strict=True)
    return CacheGroups((mixer.state(size, types) for mixer, size in pairs), owners)
