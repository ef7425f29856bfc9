"""How the kernels of a layer are combined: where norms, RoPE and residual sums are computed.

A norm is computed by the next product (prologue), by a kernel, or by the previous product up to a
factor per token (deferred). RoPE is computed by the product that makes q and k (epilogue), by
attention, or by a kernel. Plans are memoised: no step decides anything twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ....gguf import GGUFError
from ....kernels.attention.rope_kv import Rotation
from ....kernels.gemm.gemm import Epilogue
from ....kernels.layout.pack import PLAIN, UNIT
from ....kernels.moe.route import MAX_LATE_EXPERTS, RouterChoice
from ...experts import LEAST_SUM
from ...interface import (
    Attention,
    Dense,
    FeedForward,
    GatedDeltaNet,
    Head,
    Layer,
    Mixer,
    MoE,
    Norm,
)
from ..arrays import Matrix, one_layout
from .problem import NormIn, Problem, ProductPlan, StepClass
from .products import ProductPlanner

ROPE_EPILOGUE_TOKENS = (
    # least number of tokens for the RoPE epilogue of prefill GEMMs: with fewer it gains nothing
    1024
)
LATE_TOKENS = 4  # for more, all warps of their GEMVs would take longer than the router
PAIRS_TO_COPY = 2  # of a token and an expert, for each expert: from here on experts are copied


class RopeIn(Enum):
    """Where q and k are rotated."""

    EPILOGUE = "epilogue"  # by the QKV product
    KERNEL = "kernel"
    ATTENTION = "attention"


class ResidualState(NamedTuple):
    """The state of the residual stream x between two ops of a step."""

    deferred: bool = False  # x has been normalised for the next op, up to a factor per token
    # a norm of this step has stored its factors, so the next norm may be deferred
    factors: bool = False


@dataclass(frozen=True, eq=False)
class OutputPlan:
    """A product that adds to the residual stream.

    post_norm: where the post-norm of the product is computed; PROLOGUE: the next product computes
    it and the sum. deferred: the layout of the next norm's output, which this product stores, or
    PLAIN if no norm is deferred. deferred_norm: the next norm, if it is deferred. square_columns:
    columns per sum of squares.
    """

    product: ProductPlan
    post_norm: NormIn = NormIn.NONE
    deferred: int = PLAIN
    deferred_norm: Norm | None = None
    square_columns: int = 0


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The plan of a layer's attention. after: state of the residual stream after it."""

    qkv: ProductPlan
    rope: RopeIn
    o_layout: int
    out: OutputPlan
    after: ResidualState


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """The plan of a layer's gated delta net. after: state of the residual stream after it."""

    projections: ProductPlan
    out: OutputPlan
    after: ResidualState


@dataclass(frozen=True, eq=False)
class DensePlan:
    """The plan of a layer's feed-forward. glu: gate and up are one launch; otherwise a kernel
    multiplies them. after: state of the residual stream after it.
    """

    gate_up: ProductPlan
    glu: bool
    h_layout: int
    down: OutputPlan
    after: ResidualState


@dataclass(frozen=True, eq=False)
class MoEPlan:
    """The plan of a layer's experts. choice: what the router is asked for. tile_rows: of the work
    tiles of pairs that are sorted by expert, for a GEMM; 0: each pair is a GEMV. together: gate
    and up are one launch; glu: which applies the activation. shared: the products of the shared
    expert. copied: experts in host memory are copied to the device before they are multiplied.
    few_rows: the GEMM is the one for few rows an expert. late: not the router chooses, but each
    GEMV for itself.
    """

    choice: RouterChoice
    tile_rows: int
    together: bool
    glu: bool
    shared: tuple[ProductPlan, ProductPlan] | None
    after: ResidualState
    copied: bool = False
    few_rows: bool = False
    late: bool = False


class Planner(ProductPlanner):
    """Plans of one model's layers on one GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See ProductPlanner."""
        super().__init__(*args, **options)
        self._plans: dict[tuple, Any] = {}

    def input_norm(
        self, weights: Sequence[Matrix], s: StepClass, x: ResidualState, n: int, all_rows: bool
    ) -> tuple[NormIn, ResidualState]:
        """Where a product's input norm is computed, and the state of the residual stream
        after it.
        """
        if self.normalises(weights, s, n, all_rows):
            return NormIn.PROLOGUE, x._replace(deferred=False)
        if x.deferred:
            return NormIn.DEFERRED, ResidualState(factors=True)
        return NormIn.KERNEL, ResidualState(factors=self.defers(n))

    def rope(self, a: Attention, s: StepClass, kernel: Any) -> RopeIn:
        """Where q and k are rotated; kernel: the RopeKv of the layer's heads. Norms of all heads
        together are computed before that, by kernels of their own.
        """
        if a.norm_whole:
            return RopeIn.KERNEL
        if a.w_gate is not None:  # a fourth matrix, which no epilogue knows
            return RopeIn.ATTENTION if s.decode and s.fused else RopeIn.KERNEL
        norms = (a.q_norm, a.k_norm)
        n_pairs = len(a.rope.inv_freq) if a.rope else a.spec.key_size // 2
        neox = a.rope is not None and a.rope.style == "neox"
        shape = Rotation(None, n_pairs, neox, norm=norms)  # type: ignore[arg-type]
        weights, n = a.projections, s.n_tokens
        if s.decode and s.fused:
            tiles = weights[0].tiles
            fits = tiles is not None and kernel.supports_rope_epilogue_rows(shape)
            fits = fits and any(w.activations == "f16" for w in weights)
            fits = fits and self.normalises(weights, s, n, True)
            fits = fits and self.kernels.decode.holds_all_of_x(tiles, n, norm=True)
            return RopeIn.EPILOGUE if fits else RopeIn.ATTENTION
        kinds = {w.activations for w in weights}
        if n < ROPE_EPILOGUE_TOKENS or len(kinds) > 1 or not one_layout(weights):
            return RopeIn.KERNEL
        (kind,) = kinds
        fits = self.has_skinny and not self.by_cublas(weights[0], n)
        if kind != "f16":
            fits = self.has_wgmma and (kind == "int8" or not self.batch_invariant)
        return RopeIn.EPILOGUE if fits and kernel.supports_rope_epilogue(shape) else RopeIn.KERNEL

    def attention(self, layer: Layer, s: StepClass, x: ResidualState, heads: Any) -> AttentionPlan:
        """The plan of a layer's attention; heads: its HeadKernels (attention.py)."""
        key = layer, s, x
        if key not in self._plans:
            self._plans[key] = self._attention(layer, s, x, heads)
        return self._plans[key]

    def _attention(self, layer: Layer, s: StepClass, x: ResidualState, heads: Any) -> AttentionPlan:
        a = layer.mixer
        assert isinstance(a, Attention)
        refuse(a)
        if layer.parallel:
            raise lacking("attention and feed-forward in parallel")
        weights, n = a.projections, s.n_tokens
        rope = self.rope(a, s, heads.rope)
        norm, x = self.input_norm(weights, s, x, n, True)
        epilogue: Epilogue = "QKV" if rope is RopeIn.EPILOGUE else "STORE"
        qkv = self.product(weights, s, epilogue, norm)
        packs = s.fused and heads.packs and a.w_gate is None
        o_layout = self.x_layout([a.wo], s) if packs else PLAIN
        successor = None if a.bo is not None else successor_of(layer)
        out, x = self.output(a.wo, a.post_norm, successor, s, x)
        return AttentionPlan(qkv, rope, o_layout, out, x)

    def delta(self, layer: Layer, s: StepClass, x: ResidualState) -> DeltaPlan:
        """The plan of a layer's gated delta net."""
        key = layer, s, x
        if key not in self._plans:
            self._plans[key] = self._delta(layer, s, x)
        return self._plans[key]

    def _delta(self, layer: Layer, s: StepClass, x: ResidualState) -> DeltaPlan:
        d = layer.mixer
        assert isinstance(d, GatedDeltaNet)
        refuse(d)
        if layer.parallel:
            raise lacking("a gated delta net and a feed-forward in parallel")
        norm, x = self.input_norm(d.projections, s, x, s.n_tokens, True)
        projections = self.product(d.projections, s, "STORE", norm)
        out, x = self.output(d.wo, d.post_norm, successor_of(layer), s, x)
        return DeltaPlan(projections, out, x)

    def takes_glu(self, weights: Sequence[Matrix], s: StepClass) -> bool:
        """Whether one launch computes act(gate) * up."""
        problem = Problem(weights, s.n_tokens, "GLU", prefill=self.is_prefill(s))
        return self.choose(problem) is not None

    def dense(self, layer: Layer, s: StepClass, x: ResidualState) -> DensePlan:
        """A layer's feed-forward."""
        key = layer.ffn, s, x
        if key not in self._plans:
            self._plans[key] = self._dense(layer, s, x)
        return self._plans[key]

    def _dense(self, layer: Layer, s: StepClass, x: ResidualState) -> DensePlan:
        f = layer.ffn
        assert isinstance(f, Dense)
        refuse(f)
        weights, n = f.projections, s.n_tokens
        norm, x = self.input_norm(weights, s, x, n, True)
        glu = self.takes_glu(weights, s)
        # the GLU kernel packs its output as it takes its input
        packs = s.fused and glu and self.x_layout(weights, s) != PLAIN
        h_layout = self.x_layout([f.w_down], s) if packs else PLAIN
        epilogue: Epilogue = "GLU" if glu else "STORE"
        gate_up = self.product(weights, s, epilogue, norm, out_layout=h_layout)
        successor = layer.next.mixer if layer.next else None
        down, x = self.output(f.w_down, f.post_norm, successor, s, x)
        return DensePlan(gate_up, glu, h_layout, down, x)

    def moe(self, layer: Layer, s: StepClass) -> MoEPlan:
        """A layer's experts. What precedes them defers no norm, and neither do they."""
        key = layer.ffn, s
        if key not in self._plans:
            self._plans[key] = self._moe(layer, s)
        return self._plans[key]

    def expert_tile(self, choice: RouterChoice, s: StepClass) -> int:
        """Rows of a work tile of sorted pairs; 0: pairs are not sorted. A probe reads them in the
        order of tokens. With a pair an expert, sorting saves a third of the reads of weights.
        """
        n_pairs = s.n_tokens * choice.n_used
        if self.batch_invariant or not s.fused or n_pairs < choice.n_expert:
            return 0
        return self.kernels.experts.tile_rows(n_pairs, choice.n_expert)

    def few_rows(self, weights: Sequence[Matrix], choice: RouterChoice, s: StepClass) -> int:
        """Rows of a work tile of the GEMM for few rows an expert; 0: it does not run."""
        if not self.expert_tile(choice, s):
            return 0
        tiles, n_pairs = [w.in_tiles for w in weights], s.n_tokens * choice.n_used
        return self.kernels.expert_rows.tile_rows(tiles, n_pairs, choice.n_expert)

    def copies_experts(self, choice: RouterChoice, s: StepClass) -> bool:
        """Whether experts in host memory are copied to the device, all of them, or else read where
        they lie: sorted pairs read each chosen expert once, which two pairs an expert make 86 % of
        all; others read one for each pair.
        """
        least = PAIRS_TO_COPY if self.expert_tile(choice, s) else 1
        return s.n_tokens * choice.n_used >= least * choice.n_expert

    def _moe(self, layer: Layer, s: StepClass) -> MoEPlan:
        f = layer.ffn
        assert isinstance(f, MoE)
        refuse(f)
        e = f.experts
        biased = e.b_gate is not None or e.b_up is not None
        together = one_layout([e.w_gate, e.w_up])
        shared = None
        if f.shared is not None:
            gate_up = [f.shared.w_gate, f.shared.w_up]
            epilogue: Epilogue = "GLU" if self.takes_glu(gate_up, s) else "STORE"
            shared = self.product(gate_up, s, epilogue), self.product([f.shared.w_down], s)
        choice = choice_of(f)
        matrices = [e.w_gate, e.w_up, e.w_down]
        tile, few, copied = self.expert_tile(choice, s), self.few_rows(matrices, choice, s), False
        plain = not biased and e.activation != "swiglu_oai"
        glu = together and (plain or not tile or few > 0)
        if any(w.on_host for w in matrices):
            copied = self.copies_experts(choice, s)
        shape = choice, few or tile, together, glu, shared, ResidualState(), copied
        late = glu and s.fused and not tile and s.n_tokens <= LATE_TOKENS
        late = late and choice.n_expert <= MAX_LATE_EXPERTS
        return MoEPlan(*shape, few_rows=few > 0, late=late)

    def output(
        self,
        w: Matrix,
        post_norm: Norm | None,
        successor: Mixer | FeedForward | None,
        s: StepClass,
        x: ResidualState,
    ) -> tuple[OutputPlan, ResidualState]:
        """The plan of a product that adds to x; successor: the next part of the network that
        takes x.
        """
        if post_norm is not None:
            left = s.decode and s.fused and successor and self.adds(successor.projections, s)
            where = NormIn.PROLOGUE if left else NormIn.KERNEL
            return OutputPlan(self.product([w], s), where), x
        product, layout = self.product([w], s, "ADD"), PLAIN
        if successor is not None and successor.norm is not None and x.factors:
            layout = self._deferred_layout(w, successor.projections, s)
        if successor is None or layout == PLAIN:
            return OutputPlan(product), x
        assert w.tiles is not None and successor.norm is not None
        columns = self.kernels.square_columns(self.is_skinny(w.tiles, s.n_tokens))
        out = OutputPlan(product, NormIn.NONE, layout, successor.norm, columns)
        return out, x._replace(deferred=True)

    def _deferred_layout(self, w: Matrix, successor: Sequence[Matrix], s: StepClass) -> int:
        """Layout in which a GEMM with w stores the deferred norm for the products in `successor`;
        PLAIN: w defers no norm.
        """
        tiles = [m.tiles for m in (w, *successor) if m.tiles is not None]
        if len(tiles) <= len(successor) or not self.defers(s.n_tokens, tiles) or w.n_rows % UNIT:
            return PLAIN
        return self.x_layout(successor, s) if self.x_layout([w], s) != PLAIN else PLAIN

    def head(self, head: Head, s: StepClass, x: ResidualState) -> ProductPlan:
        """The plan of the logits of the wanted rows."""
        key = head, s, x
        if key not in self._plans:
            refuse(head)
            norm, _ = self.input_norm([head.weight], s, ResidualState(), s.n_rows, s.all_rows)
            self._plans[key] = self.product([head.weight], s, "STORE", norm, s.n_rows)
        return self._plans[key]

    def forget(self) -> None:
        """Drop all plans; call before weights change."""
        self._plans.clear()


def choice_of(f: MoE) -> RouterChoice:
    """What a router is asked for."""
    r, n_expert = f.router, f.experts.w_up.n_experts
    return RouterChoice(n_expert, r.n_used, r.score, r.normalise, r.scale, r.groups, LEAST_SUM)


def successor_of(layer: Layer) -> Mixer | FeedForward | None:
    """What takes x behind a layer's mixer; None for experts, which take x as it is."""
    successor = layer.ffn or (layer.next.mixer if layer.next else None)
    return None if isinstance(successor, MoE) else successor


def refuse(part: Mixer | FeedForward | Head) -> None:
    """Raises GGUFError for what no kernel computes."""
    norms = [part.norm, getattr(part, "post_norm", None)]
    whole, temperature = getattr(part, "norm_whole", False), getattr(part, "temperature", None)
    length = temperature.length if temperature else 0
    biased = getattr(part, "bo", None) is not None and norms[1] is not None
    problem = choice_of(part).problem if isinstance(part, MoE) else ""
    found = {
        "layer norms and norms with a bias": any(n and not n.is_rms for n in norms),
        "a bias of the attention's output before a norm": biased,
        "attention to later tokens": not getattr(part, "causal", True),
        "a scale of what is added to the residual stream": getattr(part, "residual_scale", 1) != 1,
        "norms of heads behind RoPE": getattr(part, "norm_after_rope", False),
        "attention in chunks": getattr(part, "chunked", False),
        "weights of experts on what they take": isinstance(part, MoE) and part.router.weighs_input,
        "norms of all heads with a bias": whole and getattr(part, "bq", None) is not None,
        "norms of values": getattr(part, "v_norm", None) is not None,
        "keys that are values, or another layer's": isinstance(part, Attention)
        and (part.wk is None or part.wv is None),
        f"queries that grow with their position (none do up to -c {length})": length > 0,
        problem: bool(problem),
    }
    for what, there in found.items():
        if there:
            raise lacking(what)


def lacking(what: str) -> GGUFError:
    """The error for what no kernel computes."""
    return GGUFError(f"the CUDA backend has no kernel for {what}: use --device cpu")
