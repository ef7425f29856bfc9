"""How the kernels of a layer are combined: where norms, RoPE and residual sums are computed.

| | may be computed by |
|---|---|
| norm | the next product (prologue), a kernel, or the previous product up to a factor (deferred) |
| RoPE | the product that makes q and k (epilogue), attention, or a kernel |

The factor of a deferred norm is one number per token. Plans are memoised: no choice is made twice.
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
from ...inputs import LayerInputs
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
from ..delta.states import shape_of
from .beside import beside_problem
from .ends import EndPlan, plan_end, plan_projection
from .experts import MoEPlan, choice_of, plan_experts
from .problem import NormIn, Problem, ProductPlan, StepClass
from .products import ProductPlanner
from .recurrence import Recurrence, recurrence_of
from .successors import Adds, InputGate, Successor, after_ffn, is_rms, successor_of
from .unusual import unusual_heads

# least number of tokens for the RoPE epilogue of prefill GEMMs: with fewer it saves no time
ROPE_EPILOGUE_TOKENS = 1024
MOST_PLANS = 1 << 15  # kept at once: 500 classes of steps with 32 layers, about 30 MB


class RopeIn(Enum):
    """Where q and k are rotated."""

    EPILOGUE = "epilogue"  # by the QKV product
    KERNEL = "kernel"
    ATTENTION = "attention"


class ResidualState(NamedTuple):
    """The state of the residual stream x between two ops of a step."""

    deferred: bool = False  # x has been normalised for the next op, up to a factor per token
    normed: bool = False  # x has been normalised for the next op
    # a norm of this step has stored its factors, so the next norm may be deferred
    factors: bool = False


@dataclass(frozen=True, eq=False)
class SumPlan:
    """How something is added to the residual stream.

    post_norm: where the norm of what is added is computed; PROLOGUE: the next product computes it
    and the sum. next_norm: the norm of the next product, if it is computed with the sum: by the
    kernel of the post-norm, or, without a post-norm, up to a factor per token (deferred).
    next_layout: the layout of its output.
    """

    post_norm: NormIn = NormIn.NONE
    next_norm: Norm | None = None
    next_layout: int = PLAIN


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputPlan(SumPlan):
    """A product that adds to the residual stream. square_columns: columns per sum of squares, which
    a deferred norm needs.
    """

    product: ProductPlan
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
    recurrence: Recurrence
    o_layout: int
    out: OutputPlan
    after: ResidualState


@dataclass(frozen=True, eq=False)
class DensePlan:
    """The plan of a layer's feed-forward. glu: gate and up are one launch, which also multiplies
    act(gate) by up; otherwise a kernel does. after: state of the residual stream after it.
    """

    gate_up: ProductPlan
    glu: bool
    h_layout: int
    down: OutputPlan
    after: ResidualState


class Planner(ProductPlanner):
    """Plans of one model's layers on one GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See ProductPlanner."""
        super().__init__(*args, **options)
        self._plans: dict[tuple, Any] = {}

    def input_norm(
        self,
        norm: Norm | None,
        weights: Sequence[Matrix],
        s: StepClass,
        x: ResidualState,
        n: int,
        all_rows: bool,
    ) -> tuple[NormIn, ResidualState]:
        """Where the norm of a product's input is computed, and the state of the residual stream
        after it.
        """
        if not is_rms(norm):
            return NormIn.KERNEL, ResidualState()
        if self.normalises(weights, s, n, all_rows):
            return NormIn.PROLOGUE, x._replace(deferred=False)
        if x.normed:
            return NormIn.SHARED, ResidualState()
        if x.deferred:
            return NormIn.DEFERRED, ResidualState(factors=True)
        return NormIn.KERNEL, ResidualState(factors=self.defers(n))

    def rope(self, a: Attention, s: StepClass, kernel: Any) -> RopeIn:
        """Where q and k are rotated. kernel: the RopeKv of the layer's heads. Norms over all heads
        together are computed before RoPE, by their own kernels.
        """
        if a.norm_whole or unusual_heads(a) is not None:
            return RopeIn.KERNEL
        if a.w_gate is not None or a.v_norm is not None or a.wk is None or a.wv is None:
            # no epilogue supports a fourth matrix, a norm of v, or fewer than three matrices
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
        weights, n = a.projections, s.n_tokens
        rope = self.rope(a, s, heads.rope)
        norm, x = self.input_norm(a.norm, weights, s, x, n, True)
        epilogue: Epilogue = "QKV" if rope is RopeIn.EPILOGUE else "STORE"
        qkv = self.product(weights, s, epilogue, norm)
        packs = s.fused and heads.packs
        o_layout = self.x_layout([a.wo], s) if packs else PLAIN
        successor = None if a.bo is not None else successor_of(layer)
        out, x = self.output(a.wo, a, successor, s, x)
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
        norm, x = self.input_norm(d.norm, d.projections, s, x, s.n_tokens, True)
        projections = self.product(d.projections, s, "STORE", norm)
        packs = s.fused and shape_of(d.spec).packs
        o_layout = self.x_layout([d.wo], s) if packs else PLAIN
        out, x = self.output(d.wo, d, successor_of(layer), s, x)
        recurrence = recurrence_of(d.spec, s, self.arch, self.is_prefill(s))
        return DeltaPlan(projections, recurrence, o_layout, out, x)

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
        norm, x = self.input_norm(f.norm, weights, s, x, n, True)
        if layer.parallel and self.shares_norm(layer, s):
            norm = NormIn.SHARED
        glu = self.takes_glu(weights, s)
        # the GLU kernel packs its output only if its input is packed
        packs = s.fused and glu and self.x_layout(weights, s) != PLAIN
        h_layout = self.x_layout([f.w_down], s) if packs else PLAIN
        epilogue: Epilogue = "GLU" if glu else "STORE"
        gate_up = self.product(weights, s, epilogue, norm, out_layout=h_layout)
        down, x = self.output(f.w_down, f, after_ffn(layer), s, x)
        return DensePlan(gate_up, glu, h_layout, down, x)

    def shares_norm(self, layer: Layer, s: StepClass) -> bool:
        """Whether one kernel normalises x for both parts of a parallel layer."""
        a, f = layer.mixer, layer.ffn
        assert isinstance(f, Dense)
        same = a.norm == f.norm and not is_rms(f.norm)
        return same and self.normed_layout(a.projections, s) == self.normed_layout(f.projections, s)

    def moe(self, layer: Layer, s: StepClass) -> MoEPlan:
        """The plan of a layer's experts. No norm is deferred before or after them."""
        key = layer.ffn, s
        if key not in self._plans:
            assert isinstance(layer.ffn, MoE)
            refuse(layer.ffn)
            self._plans[key] = plan_experts(self, layer, s, ResidualState())
        return self._plans[key]

    def projected_inputs(self, inputs: LayerInputs, s: StepClass) -> ProductPlan:
        """The plan of the product that makes the inputs of all layers."""
        key = inputs, s
        if key not in self._plans:
            self._plans[key] = plan_projection(self, inputs, s, ResidualState())
        return self._plans[key]

    def end(self, layer: Layer, s: StepClass, x: ResidualState) -> EndPlan:
        """The plan of a layer's input. No norm is deferred before or after it."""
        x = ResidualState(normed=x.normed)
        key = layer.input, s, x
        if key not in self._plans:
            self._plans[key] = plan_end(self, layer, s, x)
        return self._plans[key]

    def output(
        self,
        w: Matrix,
        part: Adds,
        successor: Successor | None,
        s: StepClass,
        x: ResidualState,
    ) -> tuple[OutputPlan, ResidualState]:
        """The plan of a product that adds to x, the last product of a part of a layer. successor:
        the next part of the network that takes x. A residual scale is computed as a norm.
        """
        if part.post_norm is not None or part.residual_scale != 1:
            total, x = self.sum_of(part.post_norm, successor, s, x)
            return OutputPlan(product=self.product([w], s), **vars(total)), x
        product, layout = self.product([w], s, "ADD"), PLAIN
        norm = None if successor is None or isinstance(successor, InputGate) else successor.norm
        if successor is not None and norm is not None and is_rms(norm) and x.factors:
            layout = self._deferred_layout(w, successor.projections, s)
        if layout == PLAIN:
            return OutputPlan(product=product), x
        assert w.tiles is not None
        columns = self.kernels.square_columns(self.is_skinny(w.tiles, s.n_tokens))
        out = OutputPlan(NormIn.NONE, norm, layout, product=product, square_columns=columns)
        return out, x._replace(deferred=True)

    def sum_of(
        self, norm: Norm | None, successor: Successor | None, s: StepClass, x: ResidualState
    ) -> tuple[SumPlan, ResidualState]:
        """How x + norm(y) is computed, and the state of the residual stream after it.

        successor: the next part of the network that takes x.
        """
        by_kernel = SumPlan(NormIn.KERNEL), x
        if successor is None or not (is_rms(norm) and is_rms(successor.norm) and s.fused):
            return by_kernel
        weights, n = successor.projections, s.n_tokens
        if s.decode and self.adds(weights, s):
            return SumPlan(NormIn.PROLOGUE), x
        if successor.norm is None or self.normalises(weights, s, n, True):
            return by_kernel
        if not self.kernels.rms_norm.takes_next(n):
            return by_kernel
        layout = self.normed_layout(weights, s)
        return SumPlan(NormIn.KERNEL, successor.norm, layout), ResidualState(normed=True)

    def _deferred_layout(self, w: Matrix, successor: Sequence[Matrix], s: StepClass) -> int:
        """The layout in which a GEMM with w stores the deferred norm for the matrices `successor`;
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
            if len(self._plans) >= MOST_PLANS:  # the head is the end of a step
                self._plans.clear()
            refuse(head)
            sizes = s.n_rows, s.all_rows
            norm, _ = self.input_norm(head.norm, [head.weight], s, ResidualState(), *sizes)
            self._plans[key] = self.product([head.weight], s, "STORE", norm, s.n_rows)
        return self._plans[key]

    def forget(self) -> None:
        """Drop all plans; call before weights change."""
        self._plans.clear()


def refuse(part: Mixer | FeedForward | Head) -> None:
    """Raises GGUFError if no kernel computes the part."""
    whole, head_norms = getattr(part, "norm_whole", False), _head_norms(part)
    problem = choice_of(part).problem or beside_problem(part) if isinstance(part, MoE) else ""
    found = {
        "norms of heads with a bias": any(n.bias is not None for n in head_norms) and not whole,
        "norms of all heads after RoPE": whole and getattr(part, "norm_after_rope", False),
        "values without a matrix of their own beside such norms of keys": _has_few_matrices(part),
        problem: bool(problem),
    }
    for what, there in found.items():
        if there:
            raise lacking(what)


def _head_norms(part: Mixer | FeedForward | Head) -> list[Norm]:
    norms = (getattr(part, name, None) for name in ("q_norm", "k_norm"))
    return [norm for norm in norms if norm is not None]


def _has_few_matrices(part: Mixer | FeedForward | Head) -> bool:
    """Whether attention has a norm of q and k whose kernels need three matrices q, k and v without
    a norm of v, but has fewer matrices, or has a norm of v.
    """
    if not isinstance(part, Attention):
        return False
    shared = part.wk is None or part.v_norm is not None
    return (shared and unusual_heads(part) is not None) or (part.norm_whole and part.wv is None)


def lacking(what: str) -> GGUFError:
    """The error for a computation that no kernel supports."""
    return GGUFError(f"the CUDA backend has no kernel for {what}: use --device cpu")
