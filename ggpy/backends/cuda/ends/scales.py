"""Scales of what layers return, folded away: the residual stream is kept divided by the product of
the scales so far, which changes the eps of norms and the weights of norms of what is added.

Where that product gets too large or too small, or a layer adds something that has no norm, a kernel
multiplies the stream instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....kernels.gemm.gemm import INPUT_RANGE
from ...interface import Attention, Dense, Layer, MoE, Norm
from ..norm import Norms

MOST = 1e6  # a stream is divided by this at most, and by its inverse at least


@dataclass(frozen=True, eq=False)
class ScaledLayer:
    """A layer as it is computed. before: what the stream is divided by that the layer takes; after:
    that which it returns. gate_norm: of what the gate of the layer's input multiplies, which is x /
    INPUT_RANGE.
    """

    layer: Layer
    before: float = 1.0
    after: float = 1.0
    gate_norm: Norm | None = None


class LayerScales(dict[Layer, ScaledLayer]):
    """The layers of a model as they are computed. One that is missing is added with all layers
    behind it: the first of a model is asked for first.
    """

    def __init__(self, norms: Norms) -> None:
        super().__init__()
        self._norms = norms

    def __missing__(self, first: Layer) -> ScaledLayer:
        layers = [first]
        while layers[-1].next is not None:
            layers.append(layers[-1].next)
        folds = all(map(_has_norms, layers))
        befores = [1.0]
        for layer in layers:
            product = befores[-1] * layer.scale
            befores.append(product if folds and 1 / MOST <= product <= MOST else 1.0)
        following: Layer | None = None
        for i in reversed(range(len(layers))):
            found = self._scaled(layers[i], befores[i], befores[i + 1], following)
            self[layers[i]], following = found, found.layer
        return self[first]

    def _scaled(
        self, layer: Layer, before: float, after: float, following: Layer | None
    ) -> ScaledLayer:
        gate_norm = None
        if layer.input is not None:
            k = layer.input.gate.k
            gate_norm = self._norms.scaled(self._norms.identity(k), k, before / INPUT_RANGE)
        if layer.scale == before == after == 1 and following is layer.next:
            return ScaledLayer(layer, gate_norm=gate_norm)
        own = layer.input
        changed = replace(
            layer,
            mixer=self._divided(layer.mixer, before),
            ffn=self._divided(layer.ffn, before),
            input=None
            if own is None
            else replace(own, post_norm=self._given(own.post_norm, before)),
            scale=layer.scale * before if after == 1 else 1.0,
            next=following,
        )
        return ScaledLayer(changed, before, after, gate_norm)

    def _divided(self, part: Any, before: float) -> Any:
        """A mixer or a feed-forward whose x is divided by `before`, and what it adds, too."""
        if part is None or before == 1:
            return part
        norm, post_norm = taken(part.norm, before), self._given(part.post_norm, before)
        part = replace(part, norm=norm, post_norm=post_norm)
        if not isinstance(part, MoE):
            return part
        d, r = part.dense, part.router
        assert d is not None and d.norm is not None
        beside = replace(d, norm=taken(d.norm, before))
        return replace(part, router=replace(r, norm=taken(r.norm, before)), dense=beside)

    def _given(self, norm: Norm, before: float) -> Norm:
        """The norm, of which the result is divided by `before`."""
        k = norm.weight.nbytes // 4
        return norm if before == 1 else self._norms.scaled(norm, k, 1 / before)


def taken(norm: Norm, before: float) -> Norm:
    """The norm of x, of x / before."""
    return norm if before == 1 else replace(norm, eps=norm.eps / before**2)


def _has_norms(layer: Layer) -> bool:
    """Whether the layer normalises all it takes, and all it adds."""
    parts: list[Any] = [part for part in (layer.mixer, layer.ffn) if part is not None]
    return all(
        isinstance(part, Attention | Dense | MoE)
        and part.norm is not None
        and part.post_norm is not None
        and part.post_norm.weight is not None
        and (not isinstance(part, MoE) or (part.dense is not None and part.dense.norm is not None))
        for part in parts
    )
