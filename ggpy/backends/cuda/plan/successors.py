"""What takes the residual stream next, and which norms products can compute."""

from __future__ import annotations

from ...interface import FeedForward, Layer, Mixer, MoE, Norm


def successor_of(layer: Layer) -> Mixer | FeedForward | None:
    """What takes x behind a layer's mixer; None for experts, which take x as it is, and in a
    parallel layer, whose feed-forward takes the x before.
    """
    if layer.parallel:
        return None
    successor = layer.ffn or entry_of(layer.next)
    return None if isinstance(successor, MoE) else successor


def entry_of(layer: Layer | None) -> Mixer | None:
    """What takes x at the beginning of a layer; None for a parallel one, where two parts do."""
    return None if layer is None or layer.parallel else layer.mixer


def is_rms(norm: Norm | None) -> bool:
    """Whether a norm is an RMS norm with weights, which products can compute, or none."""
    return norm is None or (norm.is_rms and norm.weight is not None)
