"""Mixtures of experts on a GPU: router, products of the chosen experts, their sum.

Each pair (token, expert) is a GEMV if there are few pairs; many pairs are sorted by expert, for a
grouped GEMM. The ids of chosen experts stay on the device. This module executes plans; plan/
decides how a layer is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....kernels.layout.tile import TiledMatrix
from ....kernels.moe.combine import Combine, ExpertOutputs
from ....kernels.moe.expert_gemv import ExpertAddends, ExpertGemv
from ....kernels.moe.route import LateChoice, Route, RouterWeights, Routes
from ....kernels.moe.sort import (
    PACKED_UNIT,
    WORK_BYTES,
    SortedPairs,
    SortPairs,
    packed_rows,
    work_tiles,
)
from ...experts import Experts, SharedExpert
from ...interface import Layer, MoE
from ..arrays import Array, Memory, blocks_of
from ..context import StepContext
from ..gemm import ProductOperands
from ..plan import MoEPlan, is_rms
from .beside import DenseBeside
from .packed import PackedExperts
from .staging import ExpertStaging


@dataclass(frozen=True)
class ChosenPairs:
    """The pairs (token, expert) of a step: the outputs of the router, the experts, the input (f16,
    a row per token), the number of pairs, the plan, and the order in a sorted step.
    """

    routes: Routes
    ids: Memory | LateChoice
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
        self._gemv = ExpertGemv(self.device)
        self._gemm = context.planner.kernels.experts
        self._rows = context.planner.kernels.expert_rows
        self._combines: dict[bool, Combine] = {}
        self.staging = ExpertStaging(self.device, context.scratch)
        self._packed = PackedExperts(context, self.staging)
        self._beside = DenseBeside(context)

    @cached_property
    def _sort(self) -> SortPairs:
        return SortPairs(self.device)

    def _combine(self, f: MoE) -> Combine:
        weighs_input = f.router.weighs_input
        if weighs_input not in self._combines:
            self._combines[weighs_input] = Combine(self.device, weighs_input)
        return self._combines[weighs_input]

    def feed_forward(self, x: Array, layer: Layer) -> Array:
        """x[T, D] plus the outputs of the chosen experts and of the shared expert."""
        c, f, n = self._context, layer.ffn, x.shape[0]
        assert isinstance(f, MoE)
        plan = c.planner.moe(layer, c.s)
        c.stream = plan.after
        if plan.copied:
            self.staging.enter(layer)
        dense_h = dense = None
        if f.dense is not None:
            x, dense_h, dense = self._beside.multiply(x, f, plan)
        routes = self.route(x, f, plan)
        if c.probe and routes.ids is not None:
            n_used = plan.choice.n_used
            c.probe(layer.index, "experts", Array(routes.ids, np.int32, (n, n_used), n_used))
        if dense_h is not None and c.probe:
            c.probe(layer.index, "shared_act", dense_h)
        shared = None if f.shared is None else self.shared_expert(routes, f.shared, layer, plan, n)
        pairs = self._pairs(routes, x, plan, f.router.choice_bias)
        h = self.expert_act(pairs, f)
        if c.probe:
            shape = n, plan.choice.n_used, h.row
            c.probe(layer.index, "ffn_act", Array(h.data, np.float16, shape, h.row))
        x = self.expert_out(x, h, pairs, f, shared or dense)
        if c.probe:
            c.probe(layer.index, "ffn_out", x)
        return x

    def route(self, x: Array, f: MoE, plan: MoEPlan) -> Routes:
        """norm(x) in f16, and the experts of each token."""
        c, (n, k), r = self._context, x.shape, f.router
        gate = f.shared.gate if f.shared else None
        norm = f.norm if r.norm is None else c.norms.scaled(r.norm, k, r.norm_scale)
        if not is_rms(norm):  # the router kernel computes RMS norms only
            x = c.norms.to_f32(x, norm, c.scratch("normed f32", 4 * n * k))
            norm = c.norms.identity(k)
        weights = RouterWeights(
            *(norm.weight, norm.eps, r.weight.in_blocks.data, r.bias, r.choice_bias, gate),
            taken_norm=None if r.norm is None else f.norm.weight,
            expert_scale=r.expert_scale,
        )
        each, late = 4 * n * plan.choice.n_used, plan.late
        ids = None if late else c.scratch("expert ids", each)
        strengths = None if late else c.scratch("expert weights", each)
        gates = c.scratch("shared strength", 4 * n) if gate is not None else None
        logits = c.scratch("expert logits", 4 * n * plan.choice.n_expert)
        out = Routes(c.f16("normed", n, k).data, ids, strengths, logits, gates)
        self._route.launch(x.data, weights, plan.choice, out, n, k, *_ahead(f.experts, plan))
        return out

    def shared_expert(
        self, routes: Routes, e: SharedExpert, layer: Layer, plan: MoEPlan, n: int
    ) -> Array:
        """The output f32 [T, D] of the shared expert, before its gate is applied."""
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

    def _pairs(self, routes: Routes, x: Array, plan: MoEPlan, bias: Memory | None) -> ChosenPairs:
        """The pairs, sorted if the plan says so. bias: of the router's choice."""
        c, choice = self._context, plan.choice
        n_pairs = x.shape[0] * choice.n_used
        if routes.ids is None:
            late = LateChoice(choice, routes.logits, bias)
            return ChosenPairs(routes, late, routes.normed, n_pairs, plan)
        if not plan.tile_rows:
            return ChosenPairs(routes, routes.ids, routes.normed, n_pairs, plan)
        n_work = work_tiles(n_pairs, choice.n_expert, plan.tile_rows)
        unit, n_rows = 1, n_pairs
        if plan.packed:
            unit, n_rows = PACKED_UNIT, packed_rows(n_pairs, choice.n_expert)
        order = SortedPairs(
            c.scratch("pair of row", 4 * n_rows),
            c.scratch("row of pair", 4 * n_pairs),
            c.scratch("expert work", WORK_BYTES * n_work),
            *(plan.tile_rows, unit, n_rows),
        )
        self._sort.launch(routes.ids, order, n_pairs, choice.n_expert)
        return ChosenPairs(routes, routes.ids, routes.normed, n_pairs, plan, order)

    def expert_act(self, pairs: ChosenPairs, f: MoE) -> Array:
        """h f16 [pairs, F], the input of w_down."""
        e = f.experts
        if pairs.plan.packed:
            return self._packed.act(pairs, e)
        c, n, n_ff = self._context, pairs.n, e.w_up.n_rows
        h, both, biases = c.f16("expert h", n, n_ff), [e.w_gate, e.w_up], (e.b_gate, e.b_up)
        if pairs.plan.glu:
            with self.staging.tiles(both, pairs.plan.copied) as tiles:
                self._glu(tiles, pairs, h, e.activation, [blocks_of(bias) for bias in biases])
            return h
        parts = [c.f32(f"expert {name}", n, n_ff) for name in ("gate", "up")]
        together = pairs.plan.together and pairs.order is not None and not pairs.plan.few_rows
        for some in [slice(2)] if together else [slice(1), slice(1, 2)]:
            with self.staging.tiles(both[some], pairs.plan.copied) as tiles:
                self._multiply(tiles, pairs, parts[some])
        gate, up = (part.data for part in parts)
        pair_of = pairs.order.pair_of if pairs.order else None
        of_rows = blocks_of(e.b_gate), blocks_of(e.b_up)
        weights = pairs.routes.weights if f.router.weighs_input else None
        others = h.data, n, n_ff, e.activation, weights
        assert not isinstance(pairs.ids, LateChoice)
        self._combine(f).glu((gate, up), of_rows, pairs.ids, pair_of, *others)
        return h

    def expert_out(
        self, x: Array, h: Array, pairs: ChosenPairs, f: MoE, beside: Array | None
    ) -> Array:
        """x + the weighted outputs. beside: the output of the shared expert, or of a dense
        feed-forward.
        """
        routes, (n, k), e = pairs.routes, x.shape, f.experts
        n_used, bias, of_beside = pairs.plan.choice.n_used, blocks_of(e.b_down), _data(beside)
        if pairs.order is None and f.dense is None and not f.router.weighs_input:
            addends = ExpertAddends(routes.weights, bias, of_beside, routes.strength)
            with self.staging.tiles([e.w_down], pairs.plan.copied) as tiles:
                self._gemv.launch(
                    *(tiles, pairs.ids, h.data, x.data, n, n_used), epilogue="SUM", addends=addends
                )
            return x
        assert routes.ids is not None and routes.weights is not None
        y = self._outputs(h, pairs, e)
        row_of = pairs.order.row_of if pairs.order else None
        if f.dense is not None:
            assert beside is not None
            parts = y.data, routes.weights, row_of
            return self._beside.join(x, beside, parts, f, pairs.plan)
        outputs = ExpertOutputs(
            *(y.data, routes.ids, routes.weights, bias, row_of, of_beside, routes.strength)
        )
        self._combine(f).launch(x.data, outputs, n, n_used, k)
        return x

    def _outputs(self, h: Array, pairs: ChosenPairs, e: Experts) -> Array:
        """y f32 [rows, D], the outputs for the rows of h, without biases."""
        if pairs.plan.packed:
            return self._packed.outputs(h, pairs, e)
        y = self._context.f32("expert y", pairs.n, e.w_down.n_rows)
        shape = pairs.n, pairs.plan.choice.n_expert
        with self.staging.tiles([e.w_down], pairs.plan.copied) as tiles:
            if pairs.order is None:
                self._gemv.launch(tiles, pairs.ids, h.data, y.data, pairs.n, 1)
            elif pairs.plan.few_rows:
                self._rows.launch(tiles, pairs.order, h.data, y.data, *shape, sorted_before=True)
            else:
                self._gemm.launch(tiles, pairs.order, h.data, [y.data], *shape)
        return y

    def _glu(
        self,
        tiles: Sequence[TiledMatrix],
        pairs: ChosenPairs,
        h: Array,
        activation: str,
        biases: Sequence[Memory | None],
    ) -> None:
        """h = act(gate) * up for the pairs, from rows of tokens."""
        choice = pairs.plan.choice
        if pairs.order is None:
            n_tokens = pairs.n // choice.n_used
            self._gemv.launch(
                *(tiles, pairs.ids, pairs.x, h.data, n_tokens, choice.n_used),
                epilogue="GLU",
                activation=activation,
                biases=biases,
            )
            return
        if pairs.plan.few_rows:
            self._rows.launch(
                *(tiles, pairs.order, pairs.x, h.data, pairs.n, choice.n_expert),
                n_used=choice.n_used,
                epilogue="GLU",
                activation=activation,
                biases=biases,
            )
            return
        self._gemm.launch(
            *(tiles, pairs.order, pairs.x, [h.data], pairs.n, choice.n_expert),
            n_used=choice.n_used,
            epilogue="GLU",
            activation=activation,
        )

    def _multiply(
        self, tiles: Sequence[TiledMatrix], pairs: ChosenPairs, outs: Sequence[Array]
    ) -> None:
        """outs[i] f32 for the pairs, from rows of tokens; only ExpertGemm takes several weights."""
        choice, dst = pairs.plan.choice, [out.data for out in outs]
        if pairs.order is None:
            shape = pairs.n // choice.n_used, choice.n_used
            self._gemv.launch(tiles, pairs.ids, pairs.x, dst[0], *shape)
            return
        shape = pairs.n, choice.n_expert
        if pairs.plan.few_rows:
            self._rows.launch(tiles, pairs.order, pairs.x, dst[0], *shape, n_used=choice.n_used)
        else:
            self._gemm.launch(tiles, pairs.order, pairs.x, dst, *shape, n_used=choice.n_used)


def _ahead(e: Experts, plan: MoEPlan) -> tuple[Sequence[Memory], int]:
    """Matrices whose beginning the router prefetches into L2, and bytes of each: gate and up, if
    the next kernel reads nearly all experts, beginning with the first.
    """
    if not (plan.few_rows and plan.glu) or e.w_gate.on_host or e.w_up.on_host:
        return (), 0
    return (e.w_gate.in_tiles.data, e.w_up.in_tiles.data), e.w_gate.nbytes


def _data(array: Array | None) -> Memory | None:
    return None if array is None else array.data
