"""Layers' own inputs (layers.Layer.input), and the weights that make them.

This module has weights and settings; numpy/layer_inputs.py is the specification of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .layers import Activation, Norm

Weight = Any  # as in layers.py


@dataclass(frozen=True)
class LayerInput:
    """How a layer adds its input p[T, I]: x + post_norm((act(x gate^T) * p) w^T)."""

    gate: Weight  # [I, D]
    w: Weight  # [D, I]
    post_norm: Norm
    activation: Activation
    residual_scale: ClassVar[float] = 1.0


@dataclass(frozen=True)
class LayerInputs:
    """The weights that make the inputs of all layers from the embedding x[T, D] and a table.

    p[T, L, I] = (norm(x w^T / sqrt(D)) + table[ids] * sqrt(I)) / sqrt(2), with the norm over I.
    """

    table: Weight  # [V, L*I]
    w: Weight  # [L*I, D]
    norm: Norm
