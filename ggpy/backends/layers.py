"""Kinds of layers and their parts: weights, settings, and the formulas that they compute.

The code in numpy/ is the specification.

Letters: T tokens in the batch (of all sequences together), S sequences, R rows whose logits are
wanted, D width, H query heads, G key/value heads, E key size (of a query or key head), Ev value
size, F feed-forward width, V vocabulary, X experts, J experts that a token chooses, P pages of a
sequence, L layers, I size of a layer's input. In a gated delta net: Hk key heads, Hv value heads,
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
    (layer norm). `bias` is added at the end. A weight of None counts as 1.
    """

    weight: Weight  # or None
    eps: float
    bias: Weight | None = None
    centred: bool = False

    @property
    def is_rms(self) -> bool:
        """Whether this is an RMS norm without a bias."""
        return not self.centred and self.bias is None


@dataclass(frozen=True)
class AttentionTemperature:
    """Sharpens the attention of later tokens: multiplies q at position p by
    1 + scale * ln(1 + (p + offset) // length).
    """

    scale: float
    length: int  # positions
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """A mixer: x + post_norm(softmax(mask(cap(q k^T * scale))) v wo^T) * residual_scale.

    Without wk, the layer attends to the keys and values that an earlier layer with the same group
    and slot writes. With wk but without wv, the values are the projection by wk, before the norm
    and the rotation of keys.
    """

    spec: PagedKV
    group: int  # the layer's group in the cache
    slot: int  # the layer's index in the group
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
    norm_whole: bool = False  # q_norm and k_norm are over all heads together: H*E and G*E
    norm_by_head: bool = False  # q_norm and k_norm have weights for each head: H*E and G*E
    norm_after_rope: bool = False  # q_norm and k_norm come after the rotation
    temperature: AttentionTemperature | None = None  # of q, after rope
    soft_cap: float = 0.0  # c * tanh(s / c); 0 is none
    sinks: Weight | None = None  # [H], one more logit per head in the softmax, without a value
    post_norm: Norm | None = None  # of what is added to x
    residual_scale: float = 1.0
    # False: a token sees later tokens too; with a window of W, those up to W // 2 away on either
    # side. A step then contains the whole text.
    causal: bool = True
    # With a window: a token sees its own chunk only; chunks begin at multiples of `window`.
    chunked: bool = False

    @property
    def projections(self) -> list[Weight]:
        """The matrices that are multiplied with the normalised x. The gate has as many rows as wq
        and comes next to it, because files often store wv in another format than the rest.
        """
        return [w for w in (self.wq, self.w_gate, self.wk, self.wv) if w is not None]


@dataclass(frozen=True)
class GatedDeltaNet:
    """A mixer: x + (norm(o) * silu(n w_gate^T)) wo^T, with o[T, Hv, S] of the gated delta rule
    (Yang et al. 2024, arXiv 2412.06464), and n = norm(x).

    q[Hk, S], k[Hk, S] and v[Hv, S] are silu(conv(n w_qkv^T)), where conv is over the last `taps`
    tokens of each channel; q and k are scaled to length 1, then q is divided by sqrt(S). Each value
    head has a state M[S, S]. For each token, in this order:
    M = exp(a * softplus(n w_alpha^T + dt)) M,
    M = M + k (sigmoid(n w_beta^T) (v - M^T k))^T,
    o = M^T q.
    """

    spec: Recurrent
    group: int  # the layer's group in the cache
    slot: int  # the layer's index in the group
    norm: Norm  # of x
    w_qkv: Weight  # [C, D]
    w_gate: Weight  # [Hv*S, D]
    w_beta: Weight  # [Hv, D]
    w_alpha: Weight  # [Hv, D]
    conv: Weight  # [C*taps]; each channel begins with the weight of the oldest token
    a: Weight  # [Hv], below 0
    dt: Weight  # [Hv]
    out_norm: Norm  # over S, of each head
    wo: Weight  # [D, Hv*S]
    tiled: bool  # the key head of value head h is h % Hk if True, h // (Hv / Hk) if False
    post_norm: Norm | None = None  # always None; Attention may have one
    residual_scale: float = 1.0

    @property
    def projections(self) -> list[Weight]:
        """The matrices that are multiplied with the normalised x."""
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
        """The matrices that are multiplied with the normalised x."""
        return [self.w_gate, self.w_up]


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: x + sum of weight * expert(n) over the chosen experts, n = norm(x). The
    sum is in the order of the choice; the shared expert comes last.

    With `dense`: x + post_norm(d + expert_norm(that sum)), where d is what `dense` would add to x;
    there is no shared expert.
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
        """The matrices that are multiplied with the normalised x of all tokens."""
        shared = self.shared
        return [self.router.weight, *([shared.w_gate, shared.w_up] if shared else [])]


Mixer = Attention | GatedDeltaNet
FeedForward = Dense | MoE


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. `next` lets a backend fuse the end of this layer with the beginning of the next.

    `next` is None for the last layer. parallel: mixer and ffn take the same x, and `mix` adds the
    outputs of both. `end_layer` computes `input` and `scale`.
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
