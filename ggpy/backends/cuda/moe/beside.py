"""A dense feed-forward beside experts, on a GPU. It comes first: its product stores the residual
stream that the router takes. A kernel joins the outputs of both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ....kernels.moe.join import Beside, Join
from ...interface import MoE
from ..arrays import Array, Memory
from ..context import StepContext
from ..dense import gated
from ..plan import MoEPlan


class DenseBeside:
    """Executes the plans of dense feed-forwards beside experts."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @cached_property
    def _join(self) -> Join:
        return Join(self._context.device)

    def multiply(self, x: Array, f: MoE, plan: MoEPlan) -> tuple[Array, Array, Array]:
        """(x without a pending sum, h f16 [T, F], y f32 [T, D] before its norm)."""
        c, d = self._context, f.dense
        assert d is not None and plan.beside is not None
        h = gated(c, x, d, plan.beside.gate_up, plan.beside.glu)
        y = c.f32("shared y", x.shape[0], d.w_down.n_rows)
        c.gemms.run(plan.beside.down, h, [d.w_down], [y])
        return (x if x.sum is None else replace(x, sum=None)), h, y

    def join(
        self,
        x: Array,
        dense: Array,
        parts: tuple[Memory, Memory, Memory | None],
        f: MoE,
        p: MoEPlan,
    ) -> Array:
        """x + post_norm(norm(dense) + norm(experts)). parts: the outputs of pairs, their weights,
        and their rows in a sorted step.
        """
        c, (n, k) = self._context, x.shape
        assert f.dense is not None and f.dense.post_norm and f.expert_norm and f.post_norm
        assert p.beside is not None
        norms = [(norm.weight, norm.eps) for norm in (f.dense.post_norm, f.expert_norm)]
        both = c.f32("y", n, k)
        beside = Beside(dense.data, *parts)
        self._join.launch(beside, (norms[0], norms[1]), both.data, n, p.choice.n_used, k)
        return c.add_normed(x, both, f.post_norm, p.beside.total)
