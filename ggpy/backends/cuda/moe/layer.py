"""Mixtures of experts on a GPU: router, products of the chosen experts, their sum.

A few pairs of a token and an expert are each a GEMV; many are sorted by expert, for a grouped GEMM.
Which experts are chosen stays on the device. Nothing is decided here: plan/ says how a layer is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....kernels.gemm.gemm import Epilogue
from ....kernels.layout.tile import TiledMatrix
from ....kernels.moe.combine import Combine, ExpertOutputs
from ....kernels.moe.expert_gemv import ExpertGemv
from ....kernels.moe.route import Route, RouterWeights, Routes
from ....kernels.moe.sort import WORK_BYTES, SortedPairs, SortPairs, work_tiles
from ...experts import SharedExpert
from ...interface import Layer, MoE
from ..arrays import Array, Matrix, Memory
from ..context import StepContext
from ..gemm import ProductOperands
from ..plan import MoEPlan, is_rms
from .staging import ExpertStaging


@dataclass(frozen=True)
class ChosenPairs:
    """The pairs of a step, each of a token and an expert: what the router says of them, what is
    multiplied (f16, rows of tokens), and their order in a sorted step.
    """

    routes: Routes
    x: Memory
    n: int
    plan: MoEPlan
    order: SortedPairs | None = None


class MoEOps:
    """Executes the plans of mixtures of experts."""

    def __init__(self, context: StepContext) -> None:
        """Compiles nothing."""
        self._context, self.device = context, context.device
        self._route = Route(self.device)
        self._gemv = ExpertGemv(self.device, context.planner.kernels.decode)
        self._gemm = context.planner.kernels.experts
        self._combines: dict[bool, Combine] = {}
        self.staging = ExpertStaging(self.device, context.scratch)

    @cached_property
    def _sort(self) -> SortPairs:
        return SortPairs(self.device)

    def _combine(self, f: MoE) -> Combine:
        weighs_input = f.router.weighs_input
        if weighs_input not in self._combines:
            self._combines[weighs_input] = Combine(self.device, weighs_input)
        return self._combines[weighs_input]

    def feed_forward(self, x: Array, layer: Layer) -> Array:
        """x[T, D] with the outputs of the chosen experts and of the shared one added."""
        c, f, n = self._context, layer.ffn, x.shape[0]
        assert isinstance(f, MoE)
        plan = c.planner.moe(layer, c.s)
        c.stream = plan.after
        if plan.copied:
            self.staging.enter(layer)
        routes = self.route(x, f, plan)
        if c.probe:
            n_used = plan.choice.n_used
            c.probe(layer.index, "experts", Array(routes.ids, np.int32, (n, n_used), n_used))
        shared = None if f.shared is None else self.shared_expert(routes, f.shared, layer, plan, n)
        pairs = self._pairs(routes, x, plan)
        h = self.expert_act(pairs, f)
        if c.probe:
            shape = n, plan.choice.n_used, h.row
            c.probe(layer.index, "ffn_act", Array(h.data, np.float16, shape, h.row))
        self.expert_out(x, h, pairs, f, shared)
        if c.probe:
            c.probe(layer.index, "ffn_out", x)
        return x

    def route(self, x: Array, f: MoE, plan: MoEPlan) -> Routes:
        """norm(x) in f16, and the experts of each token."""
        c, (n, k), r = self._context, x.shape, f.router
        gate, norm = f.shared.gate if f.shared else None, f.norm
        if not is_rms(norm):  # which the router does not compute
            x, norm = (
                c.norms.to_f32(x, norm, c.scratch("normed f32", 4 * n * k)),
                c.norms.identity(k),
            )
        weights = RouterWeights(
            norm.weight, norm.eps, r.weight.in_blocks.data, r.bias, r.choice_bias, gate
        )
        each = 4 * n * plan.choice.n_used
        ids, strengths = c.scratch("expert ids", each), c.scratch("expert weights", each)
        gates = c.scratch("shared strength", 4 * n) if gate is not None else None
        logits = c.scratch("expert logits", 4 * n * plan.choice.n_expert)
        out = Routes(c.f16("normed", n, k).data, ids, strengths, logits, gates)
        self._route.launch(x.data, weights, plan.choice, out, n, k)
        return out

    def shared_expert(
        self, routes: Routes, e: SharedExpert, layer: Layer, plan: MoEPlan, n: int
    ) -> Array:
        """f32 [T, D], without the strength of its gate."""
        c = self._context
        assert plan.shared is not None
        gate_up, down = plan.shared
        weights, n_ff, k = [e.w_gate, e.w_up], e.w_gate.n_rows, e.w_gate.k
        x, h = Array(routes.normed, np.float16, (n, k), k), c.f16("h", n, n_ff)
        if gate_up.epilogue == "GLU":
            c.gemms.run(gate_up, x, weights, [h], ProductOperands(activation="silu"))
        else:
            gate, up = parts = [c.f32(name, n, n_ff) for name in ("gate", "up")]
            c.gemms.run(gate_up, x, weights, parts)
            c.elementwise.glu(gate.data, up.data, h.data, n * n_ff, "silu")
        if c.probe:
            c.probe(layer.index, "shared_act", h)
        y = c.f32("shared y", n, e.w_down.n_rows)
        c.gemms.run(down, h, [e.w_down], [y])
        return y

    def _pairs(self, routes: Routes, x: Array, plan: MoEPlan) -> ChosenPairs:
        """The pairs in the order in which they are multiplied."""
        c, choice = self._context, plan.choice
        n_pairs = x.shape[0] * choice.n_used
        if not plan.tile_rows:
            return ChosenPairs(routes, routes.normed, n_pairs, plan)
        n_work = work_tiles(n_pairs, choice.n_expert, plan.tile_rows)
        order = SortedPairs(
            c.scratch("pair of row", 4 * n_pairs),
            c.scratch("row of pair", 4 * n_pairs),
            c.scratch("expert work", WORK_BYTES * n_work),
            plan.tile_rows,
        )
        self._sort.launch(routes.ids, order, n_pairs, choice.n_expert)
        return ChosenPairs(routes, routes.normed, n_pairs, plan, order)

    def expert_act(self, pairs: ChosenPairs, f: MoE) -> Array:
        """h f16 [pairs, F], which meets w_down."""
        e = f.experts
        c, n, n_ff = self._context, pairs.n, e.w_up.n_rows
        h, both = c.f16("expert h", n, n_ff), [e.w_gate, e.w_up]
        if pairs.plan.glu:
            self._multiply(both, pairs, pairs.x, [h], True, "GLU", e.activation)
            return h
        parts = [c.f32(f"expert {name}", n, n_ff) for name in ("gate", "up")]
        if pairs.plan.together:
            self._multiply(both, pairs, pairs.x, parts, True)
        else:
            for w, part in zip(both, parts, strict=True):
                self._multiply([w], pairs, pairs.x, [part], True)
        gate, up = (part.data for part in parts)
        pair_of = pairs.order.pair_of if pairs.order else None
        biases = _rows(e.b_gate), _rows(e.b_up)
        weights = pairs.routes.weights if f.router.weighs_input else None
        others = h.data, n, n_ff, e.activation, weights
        self._combine(f).glu((gate, up), biases, pairs.routes.ids, pair_of, *others)
        return h

    def expert_out(
        self, x: Array, h: Array, pairs: ChosenPairs, f: MoE, shared: Array | None
    ) -> None:
        """x += the weighted outputs."""
        e = f.experts
        c, routes, (n, k) = self._context, pairs.routes, x.shape
        y = c.f32("expert y", pairs.n, k)
        self._multiply([e.w_down], pairs, h.data, [y], False)
        outputs = ExpertOutputs(
            y.data,
            routes.ids,
            routes.weights,
            _rows(e.b_down),
            pairs.order.row_of if pairs.order else None,
            shared.data if shared else None,
            routes.strength,
        )
        self._combine(f).launch(x.data, outputs, n, pairs.plan.choice.n_used, k)

    def _multiply(
        self,
        weights: Sequence[Matrix],
        pairs: ChosenPairs,
        x: Memory,
        outs: Sequence[Array],
        per_token: bool,
        epilogue: Epilogue = "STORE",
        activation: str = "silu",
    ) -> None:
        """outs[i][pair] = x[row] weights[i][expert]^T; per_token: see ExpertGemv."""
        copied = pairs.plan.copied
        tiles = self.staging.take(weights) if copied else [w.in_tiles for w in weights]
        dst = [out.data for out in outs]
        self._launch(tiles, pairs, x, dst, per_token, epilogue, activation)
        if copied:
            self.staging.done()

    def _launch(
        self,
        tiles: Sequence[TiledMatrix],
        pairs: ChosenPairs,
        x: Memory,
        dst: Sequence[Memory],
        per_token: bool,
        epilogue: Epilogue,
        activation: str,
    ) -> None:
        choice = pairs.plan.choice
        if pairs.order is not None:
            self._gemm.launch(
                *(tiles, pairs.order, x, dst, pairs.n, choice.n_expert),
                n_used=choice.n_used if per_token else 0,
                epilogue=epilogue,
                activation=activation,
            )
            return
        self._gemv.launch(
            *(tiles, pairs.routes.ids, x, dst, pairs.n, choice.n_used),
            per_token=per_token,
            ids_ready=not per_token,
            epilogue=epilogue,
            activation=activation,
        )


def _rows(bias: Matrix | None) -> Memory | None:
    """The biases of all experts, f32."""
    return None if bias is None else bias.in_blocks.data
