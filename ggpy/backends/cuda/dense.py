"""Dense feed-forward layers on a GPU: gate and up in one launch if possible, then down."""

from __future__ import annotations

from ...kernels.layout.pack import PLAIN
from ..interface import Dense, Layer
from .arrays import Array
from .context import StepContext
from .plan import DensePlan, ProductPlan


class DenseOps:
    """Executes the plans of dense feed-forward layers."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def hidden(self, x: Array, layer: Layer) -> tuple[Array, DensePlan]:
        """The input of w_down, h f16 [T, F], and the layer's plan."""
        c = self._context
        plan = c.planner.dense(layer, c.s, c.stream)
        c.stream = plan.after
        return self.ffn_act(x, layer, plan), plan

    def ffn_out(self, h: Array, x: Array, layer: Layer, plan: DensePlan) -> Array:
        """x + post_norm(h w_down^T); h and plan: from `hidden`."""
        c, f = self._context, layer.ffn
        assert isinstance(f, Dense)
        if c.probe:
            c.probe(layer.index, "ffn_act", h)
        x = c.output_product(plan.down, h, f.w_down, x, f)
        if c.probe:
            c.probe(layer.index, "ffn_out", x)
        return x

    def ffn_act(self, x: Array, layer: Layer, plan: DensePlan) -> Array:
        """h f16 [T, F] = act(n w_gate^T) * (n w_up^T), with n = norm(x)."""
        assert isinstance(layer.ffn, Dense)
        return gated(self._context, x, layer.ffn, plan.gate_up, plan.glu, plan.h_layout)


def gated(
    c: StepContext, x: Array, f: Dense, gate_up: ProductPlan, glu: bool, layout: int = PLAIN
) -> Array:
    """h f16 [T, F] = act(n w_gate^T) * (n w_up^T), with n = norm(x). glu: one launch for all."""
    n, weights, n_ff = x.shape[0], f.projections, f.w_gate.n_rows
    h = c.f16("h", n, n_ff, layout)
    if glu:
        c.input_product(gate_up, x, f.norm, weights, [h], activation=f.activation)
        return h
    gate, up = parts = [c.f32(name, n, n_ff) for name in ("gate", "up")]
    c.input_product(gate_up, x, f.norm, weights, parts)
    c.elementwise.glu(gate.data, up.data, h.data, n * n_ff, f.activation)
    return h
