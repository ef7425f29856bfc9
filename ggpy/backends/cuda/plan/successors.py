"""The next part of the network that takes the residual stream, and the norms that products can
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...inputs import LayerInput
from ...interface import Dense, Layer, Mixer, MoE, Norm
from ..arrays import Matrix


class Adds(Protocol):
    """A part of a layer whose last product adds to x."""

    @property
    def post_norm(self) -> Norm | None:
        """The norm of the output that is added to x."""
        ...

    @property
    def residual_scale(self) -> float:
        """The scale of the output that is added to x."""
        ...


@dataclass(frozen=True)
class GatedInput(LayerInput):
    """A layer's input as it is computed. gate_norm: a norm that only scales x for the gate."""

    gate_norm: Norm | None = None


@dataclass(frozen=True)
class InputGate:
    """Matrices before which no norm may be deferred: they take x without a norm, or with one that
    only scales x. They come after the feed-forward of a layer that has an input, or in a dense
    feed-forward beside experts.
    """

    projections: Sequence[Matrix]
    norm: Norm | None = None


Successor = Mixer | Dense | InputGate  # takes x, and may normalise it


def successor_of(layer: Layer) -> Successor | None:
    """The part that takes x after a layer's mixer. None for experts, unless a dense feed-forward is
    beside them, and for a parallel layer, because its feed-forward takes the same x as the mixer.
    """
    if layer.parallel:
        return None
    successor = layer.ffn or after_ffn(layer)
    if isinstance(successor, MoE):
        return InputGate(successor.dense.projections) if successor.dense else None
    return successor


def after_ffn(layer: Layer) -> Mixer | InputGate | None:
    """The part that takes x after a layer's feed-forward; None if a kernel takes x as it is."""
    own = layer.input
    if own is not None:
        return InputGate((own.gate,), own.gate_norm if isinstance(own, GatedInput) else None)
    return next_mixer(layer)


def next_mixer(layer: Layer) -> Mixer | None:
    """The mixer of the next layer, if it alone takes x there. None if that layer is parallel, and
    if this layer ends with a scale.
    """
    if layer.next is None or layer.next.parallel or layer.scale != 1:
        return None
    return layer.next.mixer


def is_rms(norm: Norm | None) -> bool:
    """Whether there is no norm, or an RMS norm with weights, which products can compute."""
    return norm is None or (norm.is_rms and norm.weight is not None)
