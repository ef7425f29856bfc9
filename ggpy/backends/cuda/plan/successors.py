"""What takes the residual stream next, and which norms products can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...interface import Dense, Layer, Mixer, MoE, Norm
from ..arrays import Matrix


class Adds(Protocol):
    """A part of a layer whose last product adds to x."""

    @property
    def post_norm(self) -> Norm | None:
        """The norm of what is added."""
        ...

    @property
    def residual_scale(self) -> float:
        """What multiplies it."""
        ...


@dataclass(frozen=True)
class InputGate:
    """What takes x, as it is, after the feed-forward of a layer that has an input."""

    projections: Sequence[Matrix]
    norm: None = None


Successor = Mixer | Dense | InputGate  # what takes x, and may normalise it


def successor_of(layer: Layer) -> Successor | None:
    """What takes x after a layer's mixer; None for experts, but for what is beside them, and in a
    parallel layer, whose feed-forward takes the x before.
    """
    if layer.parallel:
        return None
    successor = layer.ffn or after_ffn(layer)
    if isinstance(successor, MoE):
        return InputGate(successor.dense.projections) if successor.dense else None
    return successor


def after_ffn(layer: Layer) -> Mixer | InputGate | None:
    """What takes x after a layer's feed-forward; None for a kernel that takes x as it is."""
    if layer.input is not None:
        return InputGate((layer.input.gate,))
    return next_mixer(layer)


def next_mixer(layer: Layer) -> Mixer | None:
    """What takes x at the beginning of the next layer; None for a parallel one, where two parts do,
    and behind a scale of what this one returns.
    """
    if layer.next is None or layer.next.parallel or layer.scale != 1:
        return None
    return layer.next.mixer


def is_rms(norm: Norm | None) -> bool:
    """Whether a norm is an RMS norm with weights, which products can compute, or none."""
    return norm is None or (norm.is_rms and norm.weight is not None)
