"""Experts of many pairs on Hopper: the rows of sorted pairs are gathered, packed and multiplied.

Nothing is decided here: plan/ says which layers are computed so.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ....kernels.layout.pack import order_of
from ....kernels.moe.expert_wgmma import ExpertWgmma, GatedOutput
from ....kernels.moe.pack_pairs import PackPairs
from ....kernels.moe.sort import PACKED_UNIT, WORK_BYTES, SortedPairs, packed_rows, work_tiles
from ...experts import Experts
from ..arrays import Array, Matrix, Memory
from ..context import StepContext
from ..plan import MoEPlan
from .staging import ExpertStaging

if TYPE_CHECKING:
    from .layer import ChosenPairs


class PackedExperts:
    """Executes the plans of packed rows."""

    def __init__(self, context: StepContext, staging: ExpertStaging) -> None:
        """Compiles nothing."""
        self._context, self._staging = context, staging
        self._gemm = ExpertWgmma(context.device, context.device.sm_count)

    @cached_property
    def _pack(self) -> PackPairs:
        return PackPairs(self._context.device)

    def order(self, plan: MoEPlan, n_pairs: int) -> SortedPairs:
        """Memory for the order of so many pairs."""
        scratch, n_expert = self._context.scratch, plan.choice.n_expert
        n_rows, n_work = (
            packed_rows(n_pairs, n_expert),
            work_tiles(n_pairs, n_expert, plan.tile_rows),
        )
        return SortedPairs(
            scratch("pair of row", 4 * n_rows),
            scratch("row of pair", 4 * n_pairs),
            scratch("expert work", WORK_BYTES * n_work),
            *(plan.tile_rows, PACKED_UNIT, n_rows),
        )

    def act(self, pairs: ChosenPairs, e: Experts) -> Array:
        """h f16 [rows, F], packed for w_down."""
        c, order, k, n_used = self._context, pairs.order, e.w_gate.k, pairs.plan.choice.n_used
        assert order is not None
        to_gate, to_down = (order_of(w.in_tiles.layout) for w in (e.w_gate, e.w_down))
        x = c.f16("packed expert x", order.n_rows, k, to_gate)
        self._pack.launch(pairs.x, order, x.data, k, to_gate, n_used)
        h = c.f16("packed expert h", order.n_rows, e.w_up.n_rows, to_down)
        glu = GatedOutput(to_down, e.activation, (_rows(e.b_gate), _rows(e.b_up)))
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
        tiles = self._staging.take(weights) if plan.copied else [w.in_tiles for w in weights]
        sizes = pairs.n, plan.choice.n_expert
        self._gemm.launch(tiles, pairs.order, x.data, out.data, *sizes, glu)
        if plan.copied:
            self._staging.done()


def _rows(bias: Matrix | None) -> Memory | None:
    """The biases of all experts, f32."""
    return None if bias is None else bias.in_blocks.data
