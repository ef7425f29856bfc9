"""Folds the scales of layers' outputs into norms: the residual stream is stored divided by the
product of the scales so far. This changes the eps of input norms, and the weights of post-norms.

If that product gets too large or too small, or if a layer adds an output without a norm, a kernel
multiplies the stream instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....kernels.gemm.gemm import INPUT_RANGE
from ...inputs import LayerInput
from ...interface import Attention, Dense, Layer, MoE, Norm
from ..norm import Norms
from ..plan import GatedInput

MOST = 1e6  # the divisor of the stream is between 1 / MOST and MOST


@dataclass(frozen=True, eq=False)
class ScaledLayer:
    """A layer as it is computed; the gate of its input takes x / INPUT_RANGE. before, after: the
    divisors of the stream that the layer takes and that it returns.
    """

    layer: Layer
    before: float = 1.0
    after: float = 1.0


class LayerScales(dict[Layer, ScaledLayer]):
    """The layers of a model as they are computed. A missing layer is added together with all layers
    after it, so the first layer of a model must be asked for first.
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
        own = self._gated(layer.input, before)
        if layer.scale == before == after == 1 and following is layer.next and own is None:
            return ScaledLayer(layer)
        changed = replace(
            layer,
            mixer=self._divided(layer.mixer, before),
            ffn=self._divided(layer.ffn, before),
            input=own,
            scale=layer.scale * before if after == 1 else 1.0,
            next=following,
        )
        return ScaledLayer(changed, before, after)

    def _gated(self, own: LayerInput | None, before: float) -> GatedInput | None:
        """A layer's input for x / before, which adds its output / before."""
        if own is None:
            return None
        k = own.gate.k
        gate_norm = self._norms.scaled(self._norms.identity(k), k, before / INPUT_RANGE)
        post_norm = self._given(own.post_norm, before)
        return GatedInput(own.gate, own.w, post_norm, own.activation, gate_norm)

    def _divided(self, part: Any, before: float) -> Any:
        """A mixer or a feed-forward for x / before, which adds its output / before."""
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
        """The norm with its result divided by `before`."""
        k = norm.weight.nbytes // 4
        return norm if before == 1 else self._norms.scaled(norm, k, 1 / before)


def taken(norm: Norm, before: float) -> Norm:
    """The norm that makes of x / before what `norm` makes of x."""
    return norm if before == 1 else replace(norm, eps=norm.eps / before**2)


def _has_norms(layer: Layer) -> bool:
    """Whether the layer normalises all its inputs, and all outputs that it adds."""
    parts: list[Any] = [part for part in (layer.mixer, layer.ffn) if part is not None]
    return all(
        isinstance(part, Attention | Dense | MoE)
        and part.norm is not None
        and part.post_norm is not None
        and part.post_norm.weight is not None
        and (not isinstance(part, MoE) or (part.dense is not None and part.dense.norm is not None))
        for part in parts
    )
