"""Layers' own inputs on a GPU. They are made from rows of a table in host memory, one for each
token. This module executes plans; plan/ decides how products are computed.
"""

from __future__ import annotations

import numpy as np

from ....device.base import Ptr
from ....kernels.blocks.layer_inputs import EmbeddedTokens, layer_inputs
from ...inputs import LayerInputs
from ...interface import Layer
from ..arrays import Array, Memory
from ..context import StepContext
from ..plan import GatedInput
from .scales import ScaledLayer


class InputOps:
    """Executes the plans of layers' inputs, and applies layers' scales."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def layer_inputs(self, x: Array, inputs: LayerInputs, sampled: Memory | None) -> Array:
        """f32 [L, T, I], the inputs of all layers and tokens. The projection is normalised, so the
        scale of x and 1 / sqrt(D) matter only for eps.
        """
        c, (n, k), w = self._context, x.shape, inputs.w
        size = inputs.norm.weight.nbytes // 4
        plan = c.planner.projected_inputs(inputs, c.s)
        y = c.f32("projected inputs", n, w.n_rows)
        c.input_product(plan, x, None, [w], [y])
        out = c.f32("layer inputs", n, w.n_rows)
        tokens = EmbeddedTokens(c.batch.ids, sampled, y.data, n)
        norm = inputs.norm.weight, inputs.norm.eps * k
        layer_inputs(c.device, inputs.table.in_blocks, tokens, norm, out.data, size)
        return Array(out.data, np.float32, (w.n_rows // size, n, size), size)

    def end_layer(self, x: Array, scaled: ScaledLayer, inputs: Array | None) -> Array:
        """(x + norm((act(x gate^T) * p) w^T)) * scale. inputs: p f32 [L, T, I] of all layers."""
        c, layer = self._context, scaled.layer
        if layer.input is not None:
            assert inputs is not None
            x = self._add_input(x, layer, inputs)
        if layer.scale != 1:
            c.elementwise.scale(x.data, x.shape[0] * x.shape[1], layer.scale)
        return x

    def _add_input(self, x: Array, layer: Layer, inputs: Array) -> Array:
        c, own, n = self._context, layer.input, x.shape[0]
        assert isinstance(own, GatedInput)
        plan = c.planner.end(layer, c.s, c.stream)
        c.stream = plan.after
        size = own.gate.n_rows
        h = c.f16("h", n, size, plan.h_layout)
        factors = _at(inputs, 4 * layer.index * n * size)
        if plan.gate.epilogue == "INPUT":
            options = {"activation": own.activation, "factors": factors}
            c.input_product(plan.gate, x, own.gate_norm, [own.gate], [h], **options)
        else:
            gate = c.f32("gate", n, size)
            c.input_product(plan.gate, x, own.gate_norm, [own.gate], [gate])
            sizes = n, size, own.activation, plan.h_layout
            c.elementwise.gate_input(gate.data, factors, h.data, *sizes)
        if c.probe:
            c.probe(layer.index, "input_act", h)
        x = c.output_product(plan.out, h, own.w, x, own)
        if c.probe:
            c.probe(layer.index, "input_out", x)
        return x


def _at(array: Array, offset: int) -> Memory:
    memory = array.data
    return memory + offset if isinstance(memory, Ptr) else memory.at(offset)
