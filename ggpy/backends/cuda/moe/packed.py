"""Experts with many pairs on Hopper: the rows of sorted pairs are gathered, packed and multiplied.

This module executes plans; plan/ decides which layers are computed this way.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ....kernels.layout.pack import order_of
from ....kernels.moe.expert_wgmma import ExpertWgmma, GatedOutput
from ....kernels.moe.pack_pairs import PackPairs
from ...experts import Experts
from ..arrays import Array, Matrix, blocks_of
from ..context import StepContext
from .staging import ExpertStaging

if TYPE_CHECKING:
    from .layer import ChosenPairs


class PackedExperts:
    """Executes plans with packed rows."""

    def __init__(self, context: StepContext, staging: ExpertStaging) -> None:
        """Compiles nothing."""
        self._context, self._staging = context, staging
        self._gemm = ExpertWgmma(context.device, context.device.sm_count)

    @cached_property
    def _pack(self) -> PackPairs:
        return PackPairs(self._context.device)

    def act(self, pairs: ChosenPairs, e: Experts) -> Array:
        """h f16 [rows, F], packed for w_down."""
        c, order, k, n_used = self._context, pairs.order, e.w_gate.k, pairs.plan.choice.n_used
        assert order is not None
        to_gate, to_down = (order_of(w.in_tiles.layout) for w in (e.w_gate, e.w_down))
        x = c.f16("packed expert x", order.n_rows, k, to_gate)
        self._pack.launch(pairs.x, order, x.data, k, to_gate, n_used)
        h = c.f16("packed expert h", order.n_rows, e.w_up.n_rows, to_down)
        glu = GatedOutput(to_down, e.activation, (blocks_of(e.b_gate), blocks_of(e.b_up)))
        self._multiply([e.w_gate, e.w_up], pairs, x, h, glu)
        return h

    def outputs(self, h: Array, pairs: ChosenPairs, e: Experts) -> Array:
        """y f32 [rows, D], without biases."""
        assert pairs.order is not None
        y = self._context.f32("expert y", pairs.order.n_rows, e.w_down.n_rows)
        self._multiply([e.w_down], pairs, h, y)
        return y

    def _multiply(
        self,
        weights: list[Matrix],
        pairs: ChosenPairs,
        x: Array,
        out: Array,
        glu: GatedOutput | None = None,
    ) -> None:
        plan = pairs.plan
        assert pairs.order is not None
        sizes = pairs.n, plan.choice.n_expert
        with self._staging.tiles(weights, plan.copied) as tiles:
            self._gemm.launch(tiles, pairs.order, x.data, out.data, *sizes, glu)
