"""Attention over the KV cache, with grouped heads, RoPE, windows, soft caps and sinks."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.interface import Attention, AttentionTemperature, Norm, PagedKV, Rope, StateSpec
from ...cache_types import CacheTypes
from ..config import LayerSizes
from .weights import LayerWeights

# Sized by Dimensions.letters.
TENSORS = {
    "attn_norm.weight": "D",
    "attn_q.weight": "HE D",
    "attn_k.weight": "GE D",
    "attn_v.weight": "GEv D",
    "attn_output.weight": "D HEv",
}
QKV_BIAS = {"attn_q.bias": "HE", "attn_k.bias": "GE", "attn_v.bias": "GEv"}
FUSED_QKV = {  # any file may store q, k and v fused
    f"attn_qkv.{kind}": tuple(f"attn_{part}.{kind}" for part in "qkv")
    for kind in ("weight", "bias")
}
OUTPUT_BIAS = {"attn_output.bias": "D"}
NORM_BIAS = {"attn_norm.bias": "D"}
QK_NORM = {"attn_q_norm.weight": "E", "attn_k_norm.weight": "E"}
QK_NORM_BY_HEAD = {"attn_q_norm.weight": "H E", "attn_k_norm.weight": "G E"}
WHOLE_QK_NORM = {"attn_q_norm.weight": "HE", "attn_k_norm.weight": "GE"}
SINKS = {"attn_sinks.weight": "H"}
GATE = {"attn_gate.weight": "HEv D"}
POST_NORM = {"post_attention_norm.weight": "D"}


@dataclass(frozen=True)
class AttentionSettings:
    """The settings of one layer's attention."""

    scale: float  # of q.k
    rope: Rope | None = None  # None: positions are not encoded
    window: int = 0  # positions seen by a token, itself included; 0 is all
    soft_cap: float = 0.0  # of scores; 0 is none
    residual_scale: float = 1.0
    norm_whole: bool = False  # the norms of q and k are over all heads together
    norm_by_head: bool = False  # the norms of q and k have weights for each head
    norm_after_rope: bool = False
    temperature: AttentionTemperature | None = None
    v_norm_eps: float | None = None  # of an RMS norm of each head of v, without weights
    keys_of: int | None = None  # the layer whose keys and values it reads; None: its own
    causal: bool = True
    chunked: bool = False  # see interface.Attention
    unit_norm: bool = False  # norms of each head of q and k, without weights
    post_norm_eps: float | None = None  # None: that of the other norms

    def state(self, sizes: LayerSizes, types: CacheTypes) -> PagedKV:
        """The keys and values that the layer keeps for each position."""
        s = sizes
        heads = s.n_head, s.n_head_kv, s.key_size, s.value_size
        return PagedKV(*heads, self.window, types)

    def build(self, w: LayerWeights, spec: StateSpec, group: int, slot: int) -> Attention:
        """The mixer; its keys and values are at a slot of a group of the cache."""
        assert isinstance(spec, PagedKV)
        return Attention(
            spec=spec,
            group=group,
            slot=slot,
            norm=w.get_norm("attn_norm"),
            wq=w["attn_q.weight"],
            wk=w.get("attn_k.weight"),
            wv=w.get("attn_v.weight"),
            wo=w["attn_output.weight"],
            scale=self.scale,
            rope=self.rope,
            bq=w.get("attn_q.bias"),
            bk=w.get("attn_k.bias"),
            bv=w.get("attn_v.bias"),
            bo=w.get("attn_output.bias"),
            w_gate=w.get("attn_gate.weight"),
            q_norm=Norm(None, w.eps) if self.unit_norm else w.get_norm("attn_q_norm"),
            k_norm=Norm(None, w.eps) if self.unit_norm else w.get_norm("attn_k_norm"),
            v_norm=None if self.v_norm_eps is None else Norm(None, self.v_norm_eps),
            norm_whole=self.norm_whole,
            norm_by_head=self.norm_by_head,
            norm_after_rope=self.norm_after_rope,
            temperature=self.temperature,
            soft_cap=self.soft_cap,
            sinks=w.get("attn_sinks.weight"),
            post_norm=w.get_norm("post_attention_norm", self.post_norm_eps),
            residual_scale=self.residual_scale,
            causal=self.causal,
            chunked=self.chunked,
        )
