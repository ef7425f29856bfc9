"""Kinds of layers and their parts: weights and settings, and the formulas of what they compute.

numpy/ is the specification of how they are computed.

Letters: T tokens in the batch (of all sequences together), S sequences, R rows whose logits are
wanted, D width, H query heads, G key/value heads, E key size (of a query or key head), Ev value
size, F feed-forward width, V vocabulary, X experts, J experts that a token chooses, P pages of a
sequence, L layers, I size of a layer's input. Of a gated delta net: Hk key heads, Hv value heads,
S size of a head, C channels of its convolution, 2*Hk*S + Hv*S.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .experts import Experts, Router, SharedExpert
from .inputs import LayerInput
from .states import PagedKV, Recurrent

Weight = Any  # what `Ops.weight` returned: opaque to the decoder
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2 * len(inv_freq) elements of a head; the rest pass through.

    Pair i is rotated by position * inv_freq[i] radians and scaled by `magnitude`. Style "norm"
    pairs elements 2i and 2i+1, "neox" pairs i and i + len(inv_freq) (ggml's names).
    """

    style: Literal["norm", "neox"]
    inv_freq: NDArray[np.float64]
    magnitude: float = 1.0


@dataclass(frozen=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight; with `centred`, x - mean(x) instead of x
    (layer norm). `bias` is added at the end. Without a weight nothing is multiplied.
    """

    weight: Weight  # or None
    eps: float
    bias: Weight | None = None
    centred: bool = False

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMS norm without a bias."""
        return not self.centred and self.bias is None


@dataclass(frozen=True)
class AttentionTemperature:
    """Later tokens attend more sharply: q at position p times 1 + scale * ln(1 + (p + offset) //
    length).
    """

    scale: float
    length: int  # positions
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """A mixer: x + post_norm(softmax(mask(cap(q k^T * scale))) v wo^T) * residual_scale.

    Without wk it attends to what an earlier layer with the same group and slot writes. Without wv
    alone, values are what wk makes, before the norm and the rotation of keys.
    """

    spec: PagedKV
    group: int  # the group in the cache of the keys and values
    slot: int  # and their place among the layers of the group
    norm: Norm | None  # of x, before the projections; None: x is projected as it is
    wq: Weight  # [H*E, D]
    wk: Weight  # [G*E, D], or None
    wv: Weight  # [G*Ev, D], or None
    wo: Weight  # [D, H*Ev]
    scale: float  # of q.k, before the soft cap
    rope: Rope | None = None  # None: positions are not encoded
    bq: Weight | None = None  # [H*E]
    bk: Weight | None = None  # [G*E]
    bv: Weight | None = None  # [G*Ev]
    bo: Weight | None = None  # [D]
    w_gate: Weight | None = None  # [H*Ev, D]: wo multiplies o * sigmoid(n w_gate^T)
    q_norm: Norm | None = None  # over E, per head, before rope
    k_norm: Norm | None = None
    v_norm: Norm | None = None  # over Ev, per head
    norm_whole: bool = False  # those of q and k are over all heads together: H*E and G*E
    norm_by_head: bool = False  # each head has weights of its own: H*E and G*E
    norm_after_rope: bool = False
    temperature: AttentionTemperature | None = None  # of q, after rope
    soft_cap: float = 0.0  # c * tanh(s / c); 0 is none
    sinks: Weight | None = None  # [H], one logit per head that takes weight and gives nothing
    post_norm: Norm | None = None  # of what is added to x
    residual_scale: float = 1.0
    # False: a token sees later ones too, with a window of W those up to W // 2 away on either side.
    # The step then has the whole text.
    causal: bool = True
    # With a window: a token sees what is in its own chunk, of `window` positions from a multiple on
    chunked: bool = False

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x. The gate, whose rows are those of wq, stands beside it:
        files often have wv in another format than the rest.
        """
        return [w for w in (self.wq, self.w_gate, self.wk, self.wv) if w is not None]


@dataclass(frozen=True)
class GatedDeltaNet:
    """A mixer: x + (norm(o) * silu(n w_gate^T)) wo^T, with o[T, Hv, S] of the gated delta rule
    (Yang et al. 2024, arXiv 2412.06464), and n = norm(x).

    q[Hk, S], k[Hk, S] and v[Hv, S] are silu(conv(n w_qkv^T)), over the last `taps` tokens of each
    channel; q and k have length 1, q is divided by sqrt(S). A value head has the state M[S, S], and
    each token makes of it, in this order, M = exp(a * softplus(n w_alpha^T + dt)) M, then
    M = M + k (sigmoid(n w_beta^T) (v - M^T k))^T, and o = M^T q.
    """

    spec: Recurrent
    group: int  # the layer's group in the cache
    slot: int  # and its place among the layers of the group
    norm: Norm  # of x
    w_qkv: Weight  # [C, D]
    w_gate: Weight  # [Hv*S, D]
    w_beta: Weight  # [Hv, D]
    w_alpha: Weight  # [Hv, D]
    conv: Weight  # [C*taps], of each channel the oldest token's first
    a: Weight  # [Hv], below 0
    dt: Weight  # [Hv]
    out_norm: Norm  # over S, of each head
    wo: Weight  # [D, Hv*S]
    # The key head of value head h: h % Hk, or h // (Hv / Hk)
    tiled: bool
    post_norm: Norm | None = None  # there is none, as in Attention
    residual_scale: float = 1.0

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x."""
        return [self.w_qkv, self.w_gate, self.w_beta, self.w_alpha]


@dataclass(frozen=True)
class Dense:
    """A feed-forward: x + post_norm((act(n w_gate^T) * (n w_up^T)) w_down^T) * residual_scale, with
    n = norm(x).
    """

    norm: Norm | None  # None: n is x
    w_gate: Weight  # [F, D]
    w_up: Weight  # [F, D]
    w_down: Weight  # [D, F]
    activation: Activation
    post_norm: Norm | None = None
    residual_scale: float = 1.0

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x."""
        return [self.w_gate, self.w_up]


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: x + sum of weight * expert(n) over the chosen ones, in the order of the
    choice, and the shared expert last, with n = norm(x).

    Beside a dense feed-forward: x + post_norm(d + expert_norm(that sum)), where d is what `dense`
    would add to x, and there is no shared expert.
    """

    norm: Norm
    router: Router
    experts: Experts
    shared: SharedExpert | None = None
    dense: Dense | None = None
    expert_norm: Norm | None = None
    post_norm: Norm | None = None

    @property
    def projections(self) -> list[Weight]:
        """What multiplies the normalised x of all tokens."""
        shared = self.shared
        return [self.router.weight, *([shared.w_gate, shared.w_up] if shared else [])]


Mixer = Attention | GatedDeltaNet
FeedForward = Dense | MoE


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer; a backend that fuses looks at what comes next.

    `next` is the layer behind, or None for the last one. parallel: mixer and ffn take the same x,
    and `mix` adds the outputs of both. `input` and `scale` are what `end_layer` computes.
    """

    index: int
    mixer: Mixer
    ffn: FeedForward | None
    parallel: bool = False
    input: LayerInput | None = None
    scale: float = 1.0
    next: Layer | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Head:
    """From the last layer to logits: cap(norm(x) weight^T * scale)."""

    norm: Norm
    weight: Weight  # [V, D]
    soft_cap: float = 0.0
    scale: float = 1.0
