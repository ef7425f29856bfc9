"""Plans of mixtures of experts: the order of pairs (token, expert), and the kernels that multiply
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....kernels.gemm.gemm import Epilogue
from ....kernels.moe.expert_wgmma import tile_rows
from ....kernels.moe.route import MAX_LATE_EXPERTS, RouterChoice
from ...experts import LEAST_SUM
from ...interface import Layer, MoE
from ..arrays import one_layout
from .beside import BesidePlan, plan_beside
from .problem import ProductPlan, StepClass
from .products import PAIR

if TYPE_CHECKING:
    from .layers import Planner, ResidualState

PAIRS_TO_COPY = 2  # pairs per expert; from here on experts in host memory are copied
# Sorting pairs takes an H100 about as long as reading so many bytes, 12 us: others wait for the
# router, and there are two launches more.
SORTING_BYTES = 40_000_000
PAIRS_TO_SORT = 2  # pairs per expert; from here on pairs are sorted whatever that saves
LATE_TOKENS = 4  # for more tokens, choosing experts in all warps of GEMVs is slower than the router


@dataclass(frozen=True, eq=False)
class MoEPlan:
    """The plan of a layer's experts.

    | field | meaning |
    |---|---|
    | choice | how the router chooses experts |
    | tile_rows | rows of a work tile of sorted pairs, for a GEMM; 0: each pair is a GEMV |
    | together | gate and up are one launch |
    | glu | the launch of gate and up applies the activation, too |
    | after | state of the residual stream after the experts |
    | shared | the products of the shared expert |
    | copied | experts in host memory are copied to the device before they are multiplied |
    | few_rows | the GEMM is the one for few rows per expert |
    | packed | the GEMM takes packed rows |
    | late | each GEMV chooses the experts itself, from the router's logits |
    | beside | the plan of a dense feed-forward beside the experts |
    """

    choice: RouterChoice
    tile_rows: int
    together: bool
    glu: bool
    after: ResidualState
    shared: tuple[ProductPlan, ProductPlan] | None
    copied: bool
    few_rows: bool = False
    packed: bool = False
    late: bool = False
    beside: BesidePlan | None = None


def choice_of(f: MoE) -> RouterChoice:
    """How the router of a layer chooses experts."""
    r, n_expert = f.router, f.experts.w_up.n_experts
    return RouterChoice(n_expert, r.n_used, r.score, r.normalise, r.scale, r.groups, LEAST_SUM)


def plan_experts(planner: Planner, layer: Layer, s: StepClass, start: ResidualState) -> MoEPlan:
    """The plan of a layer's experts. start: the state of a residual stream without a deferred norm,
    which is also the state after experts without a feed-forward beside them.
    """
    f = layer.ffn
    assert isinstance(f, MoE)
    e, choice = f.experts, choice_of(f)
    together = one_layout([e.w_gate, e.w_up])
    shared = None
    if f.shared is not None:
        gate_up = [f.shared.w_gate, f.shared.w_up]
        epilogue: Epilogue = "GLU" if planner.takes_glu(gate_up, s) else "STORE"
        shared = planner.product(gate_up, s, epilogue), planner.product([f.shared.w_down], s)
    matrices, n_pairs = (e.w_gate, e.w_up, e.w_down), s.n_tokens * choice.n_used
    on_host = any(w.on_host for w in matrices)
    expert_bytes = 0 if on_host else sum(w.nbytes for w in matrices) // choice.n_expert
    tile = sorted_tile(planner, choice, s, expert_bytes)
    copied = on_host and copies_experts(planner, choice, s)
    may_pack = planner.has_wgmma and together and not f.router.weighs_input
    may_pack = may_pack and (copied or not on_host)  # bulk copies cannot read host memory
    few = 0  # rows of a work tile of the GEMM for few rows per expert
    if tile:
        tiles = [w.in_tiles for w in matrices]
        few = planner.kernels.expert_rows.tile_rows(tiles, n_pairs, choice.n_expert)
    packed = tile > 0 and may_pack and not few
    plain = e.b_gate is None and e.b_up is None and e.activation != "swiglu_oai"
    glu = together and (plain or not tile or few > 0) and not f.router.weighs_input
    usual = f.dense is None and choice.score != "sigmoid_chosen"
    late = glu and s.fused and not tile and s.n_tokens <= LATE_TOKENS and usual
    late = late and choice.n_expert <= MAX_LATE_EXPERTS and not planner.batch_invariant
    rows = few or tile
    if packed:
        rows, glu = tile_rows(n_pairs, choice.n_expert), True
    beside = plan_beside(planner, layer, s, start) if f.dense else None
    return MoEPlan(
        *(choice, rows, together, glu, beside.after if beside else start, shared, copied),
        few_rows=few > 0,
        packed=packed,
        late=late,
        beside=beside,
    )


def may_sort(planner: Planner, s: StepClass) -> bool:
    """Whether pairs may be sorted: not with batch invariance, nor for a probe, which reads pairs in
    the order of tokens.
    """
    return s.fused and not planner.batch_invariant


def sorted_tile(planner: Planner, choice: RouterChoice, s: StepClass, expert_bytes: int) -> int:
    """Rows of a work tile of sorted pairs; 0: pairs are not sorted. Sorted pairs read an expert
    once; pairs that are not sorted read it once each. expert_bytes: of an expert on the device; 0:
    experts are in host memory.

    Where sorting pays was measured on Hopper, with experts on the device. Elsewhere pairs are
    sorted from one pair per expert on.
    """
    n_expert, n_pairs = choice.n_expert, s.n_tokens * choice.n_used
    if planner.has_wgmma and expert_bytes > 0:
        chosen = n_expert * (1 - (1 - choice.n_used / n_expert) ** s.n_tokens)  # on average
        saves = (n_pairs - chosen) * expert_bytes >= SORTING_BYTES
        sorts = n_pairs >= PAIRS_TO_SORT * n_expert
        sorts = sorts or (saves and s.n_tokens > PAIR)  # two tokens keep their bits
    else:
        sorts = n_pairs >= n_expert
    sorts = sorts and may_sort(planner, s)
    return planner.kernels.experts.tile_rows(n_pairs, n_expert) if sorts else 0


def copies_experts(planner: Planner, choice: RouterChoice, s: StepClass) -> bool:
    """Whether all experts in host memory are copied to the device; otherwise kernels read the
    chosen ones from host memory.

    Sorted pairs read each chosen expert once; with two pairs per expert, 86 % of all experts are
    chosen. Pairs that are not sorted read an expert for each pair.
    """
    least = PAIRS_TO_COPY if may_sort(planner, s) else 1
    return s.n_tokens * choice.n_used >= least * choice.n_expert
