"""Inputs of layers in numpy: what `LayerInputs` and a layer's `LayerInput` compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...formats.base import F32
from ..inputs import LayerInputs
from ..interface import Layer
from .functions import ACTIVATIONS, added, normalised


def layer_inputs(x: F32, inputs: LayerInputs, ids: NDArray) -> F32:
    """p[T, L, I] = (norm(x w^T / sqrt(D)) + table[ids] * sqrt(I)) / sqrt(2)."""
    size = len(inputs.norm.weight)
    of_context = inputs.w.multiply(x) * np.float32(x.shape[-1] ** -0.5)
    of_token = inputs.table.rows(ids) * np.float32(size**0.5)
    n = normalised(of_context.reshape(len(x), -1, size), inputs.norm)
    return (n + of_token.reshape(n.shape)) * np.float32(2**-0.5)


def end_layer(x: F32, layer: Layer, inputs: F32 | None, probe: Callable[[str, F32], None]) -> F32:
    """(x[T, D] + norm((act(x gate^T) * p) w^T)) * scale; inputs[T, L, I]: of all layers."""
    own = layer.input
    if own is not None and inputs is not None:
        i = ACTIVATIONS[own.activation](own.gate.multiply(x)) * inputs[:, layer.index]
        probe("input_act", i)
        x = added(x, own.w.multiply(i), own.post_norm, 1.0)
        probe("input_out", x)
    return x if layer.scale == 1 else x * np.float32(layer.scale)
