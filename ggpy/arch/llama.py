"""llama: Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM2 and whatever else is converted under
this name.

Converters permute the rows of q and k so that rope's pairs are neighbours: style "norm".
"""

from __future__ import annotations

from typing import Literal

from . import hugging_face as hf
from .architecture import (
    LAYER,
    OUTPUT,
    ROPE_FACTORS,
    ROPE_FREQS,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers import attention, moe
from .layers.attention import QKV_BIAS, AttentionSettings
from .layers.dense import DenseSettings
from .layers.moe import MoESettings, read_router
from .rope import build_rope, choose_factors, read_rope

WINDOWED = (["MistralForCausalLM"], ["MixtralForCausalLM"])  # classes whose layers may have windows
MIXTRAL = {
    "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.w1.weight",
    "ffn_down_exps.weight": "block_sparse_moe.experts.w2.weight",
    "ffn_up_exps.weight": "block_sparse_moe.experts.w3.weight",
}


def read(c: Context, style: Literal["norm", "neox"] = "norm") -> ModelSettings:
    """The same rope everywhere; a window, where the file has one, in every layer."""
    settings = read_rope(c.config, c.sizes, style)
    rope = build_rope(settings, choose_factors(settings, c.tensors, c.n_ctx))
    window = c.config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    scale = c.config.real("attention.scale", 0.0) or c.sizes.layer.key_size**-0.5
    ffn = _experts(c) if c.sizes.layer.n_expert else DenseSettings("silu")
    layer = LayerSettings(AttentionSettings(scale, rope, window), ffn)
    return ModelSettings([layer] * c.sizes.n_layer)


def _experts(c: Context) -> MoESettings:
    """Mixtral's, whose weights add up to 1."""
    return MoESettings(read_router(c.config, c.sizes, normalise=True))


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Llama's; Mistral's have a window besides, which a Llama has not even if it is set; Mixtral's
    have experts.
    """
    s.only("hidden_act", "silu", "swish")
    found = {**hf.sizes(s), **hf.rope(s), **hf.head_sizes(s)}
    found["vocab_size"] = ("u32", s.integer("vocab_size", high=1 << 31))
    found["rope.dimension_count"] = ("u32", hf.head_size(s))
    if s.raw("architectures") in WINDOWED and (window := hf.window_of(s)):
        found["attention.sliding_window"] = ("u32", window)
    if s.raw("architectures") == ["MixtralForCausalLM"]:
        found |= hf.experts(s)
    return found


ARCHITECTURE = Architecture(
    "llama",
    read,
    layer=LAYER,
    expert_layer={**attention.TENSORS, **moe.TENSORS},
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    optional_layer=QKV_BIAS,
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "LlamaForCausalLM": {},
            "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
            "MixtralForCausalLM": {
                **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
                **{"rms_norm_eps": 1e-5, "rope_theta": 1e6},
            },
        },
        settings=settings,
        layer={**hf.LAYER, **MIXTRAL, **hf.QKV_BIAS},
        tensors=hf.rope_freqs,
        permuted=hf.PERMUTED,
    ),
)
