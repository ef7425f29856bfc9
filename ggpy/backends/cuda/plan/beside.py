"""Plans of dense feed-forwards beside experts. The dense feed-forward comes first, and stores the
residual stream that the router takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....kernels.gemm.gemm import Epilogue
from ...interface import Layer, MoE
from .problem import ProductPlan, StepClass
from .successors import after_ffn

if TYPE_CHECKING:
    from .layers import Planner, ResidualState, SumPlan


@dataclass(frozen=True, eq=False)
class BesidePlan:
    """The products of a dense feed-forward beside experts. glu: gate and up are one launch.
    total: how their normed sum is added to the residual stream. after: state of the residual stream
    after them.
    """

    gate_up: ProductPlan
    glu: bool
    down: ProductPlan
    total: SumPlan
    after: ResidualState


def beside_problem(f: MoE) -> str:
    """What no kernel supports in experts with a dense feed-forward beside them, or in a router with
    its own norm; "" if everything is supported.
    """
    e, r, d = f.experts, f.router, f.dense
    if d is None:
        return "a norm of routers, or a scale of experts" if r.norm or r.expert_scale else ""
    norms = f.norm, r.norm, d.norm, d.post_norm, f.expert_norm, f.post_norm
    whole = all(norm is not None and norm.is_rms for norm in norms)
    plain = e.b_down is None and d.residual_scale == 1 and f.shared is None
    if whole and plain and r.expert_scale is not None and r.norm.eps == f.norm.eps:
        return ""
    return "experts beside a dense feed-forward but with all norms, and without biases"


def plan_beside(planner: Planner, layer: Layer, s: StepClass, start: ResidualState) -> BesidePlan:
    """The plan of the feed-forward beside a layer's experts. start: the state of a residual stream
    without a deferred norm.
    """
    f = layer.ffn
    assert isinstance(f, MoE) and f.dense is not None
    weights = f.dense.projections
    norm, _ = planner.input_norm(f.dense.norm, weights, s, start, s.n_tokens, True)
    glu = planner.takes_glu(weights, s)
    epilogue: Epilogue = "GLU" if glu else "STORE"
    gate_up = replace(planner.product(weights, s, epilogue, norm), leaves_factors=False)
    down = planner.product([f.dense.w_down], s)
    return BesidePlan(gate_up, glu, down, *planner.sum_of(f.post_norm, after_ffn(layer), s, start))
