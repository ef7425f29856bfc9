"""The end of a layer as jobs of the pool: the layer's own input, and its scale.

numpy/layer_inputs.py defines what is computed; x[T, D] is in buffer "x".
"""

from __future__ import annotations

import numpy as np

from ...formats.base import F32
from ..inputs import LayerInput
from ..interface import Layer
from .jobs import JobList
from .layers import added, address_of_vector, affine, is_read
from .matrix import MappedMatrix
from .pool import address_of
from .sizes import ACTIVATIONS


def has_end(layer: Layer) -> bool:
    """Whether all that `end_layer` computes has kernels."""
    own = layer.input
    if own is None:
        return is_read(layer)
    matrices = own.gate, own.w
    return (
        all(is_read(part) for part in (layer, own, own.post_norm))
        and all(isinstance(m, MappedMatrix) for m in matrices)
        and own.activation in ACTIVATIONS
    )


def end(p: JobList, layer: Layer, shape: tuple[int, ...], inputs: F32 | None) -> None:
    """x = (x + norm((act(x gate^T) * p) w^T)) * scale. shape: of x[T, D]. inputs[T, L, I]: p of all
    layers, in memory that does not move.
    """
    rows, width = shape
    if layer.input is not None:
        assert inputs is not None
        add_input(p, layer.input, rows, address_of(inputs[:, layer.index]), inputs.strides[0])
    if layer.scale != 1:
        factors = address_of_vector(p, np.full(rows, layer.scale, np.float32))
        p.add("scale_rows", rows, 0, 0, p.buffers.floats("x", rows, width), width, factors)


def add_input(p: JobList, own: LayerInput, rows: int, inputs: int, pitch: int) -> None:
    """x += norm((act(x gate^T) * p) w^T); the rows p[I] of tokens are `pitch` bytes apart."""
    size, width = own.gate.blocks.n, own.gate.blocks.k
    gate = affine(p, own.gate, p.buffers.floats("x", rows, width), rows, None, "gate")
    h = p.buffers.floats("h", rows, size)
    p.add("gate_inputs", rows, h, 4 * size, gate, size, inputs, pitch, ACTIVATIONS[own.activation])
    added(p, affine(p, own.w, h, rows, None, "y"), rows, width, own.post_norm, 1.0)
