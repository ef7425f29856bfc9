"""llama: Llama 1 to 3, Mistral, TinyLlama, SmolLM2 and whatever else is converted under this name.

Converters permute the rows of q and k so that rope's pairs are neighbours: style "norm".
"""

from __future__ import annotations

from typing import Literal

from . import hugging_face as hf
from .architecture import (
    OUTPUT,
    ROPE_FACTORS,
    ROPE_FREQS,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers.attention import QKV_BIAS, AttentionSettings
from .layers.dense import DenseSettings
from .rope import build_rope, choose_factors, read_rope


def read(c: Context, style: Literal["norm", "neox"] = "norm") -> ModelSettings:
    """The same rope everywhere; a window, where the file has one, in every layer."""
    settings = read_rope(c.config, c.sizes, style)
    rope = build_rope(settings, choose_factors(settings, c.tensors, c.n_ctx))
    window = c.config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    scale = c.config.real("attention.scale", 0.0) or c.sizes.layer.key_size**-0.5
    layer = LayerSettings(AttentionSettings(scale, rope, window), DenseSettings("silu"))
    return ModelSettings([layer] * c.sizes.n_layer)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Llama's; Mistral's have a window besides, which a Llama has not even if it is set."""
    s.only("hidden_act", "silu", "swish")
    found = {**hf.sizes(s), **hf.rope(s), **hf.head_sizes(s)}
    found["vocab_size"] = ("u32", s.integer("vocab_size", high=1 << 31))
    found["rope.dimension_count"] = ("u32", hf.head_size(s))
    if s.raw("architectures") == ["MistralForCausalLM"] and (window := hf.window_of(s)):
        found["attention.sliding_window"] = ("u32", window)
    return found


ARCHITECTURE = Architecture(
    "llama",
    read,
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    optional_layer=QKV_BIAS,
    hugging_face=hf.HuggingFace(
        classes={
            "LlamaForCausalLM": {},
            "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
        },
        settings=settings,
        layer={**hf.LAYER, **hf.QKV_BIAS},
        tensors=hf.rope_freqs,
        permuted=hf.PERMUTED,
    ),
)
