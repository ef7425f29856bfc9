"""llama: Llama 1 to 3, Mistral, TinyLlama, SmolLM2 and whatever else is converted under this name.

Converters permute the rows of q and k so that rope's pairs are neighbours: style "norm".
"""

from __future__ import annotations

from dataclasses import replace

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
from .rope import Style, build_rope, choose_factors, read_rope


def read(c: Context, style: Style = "norm") -> ModelSettings:
    """The same rope everywhere; a window, where the file has one, in every layer."""
    window = c.config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    layer = LayerSettings(replace(attention(c, style), window=window), DenseSettings("silu"))
    return ModelSettings([layer] * c.sizes.n_layer)


def attention(c: Context, style: Style = "norm") -> AttentionSettings:
    """Over the whole context, with rope in any scaling."""
    settings = read_rope(c.config, c.sizes, style)
    rope = build_rope(settings, choose_factors(settings, c.tensors, c.n_ctx))
    scale = c.config.real("attention.scale", 0.0) or c.sizes.layer.key_size**-0.5
    return AttentionSettings(scale, rope)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Llama's; Mistral's have a window besides, which a Llama has not even if it is set."""
    found = {**usual_settings(s), **hf.head_sizes(s)}
    if s.raw("architectures") == ["MistralForCausalLM"] and (window := hf.window_of(s)):
        found["attention.sliding_window"] = ("u32", window)
    return found


def usual_settings(
    s: hf.CheckpointSettings, theta: float = 10000.0, known: tuple[str, ...] = ()
) -> hf.Metadata:
    """What llama.cpp writes for all that it derives from Llama; theta, known: see hf.rope."""
    s.only("hidden_act", "silu", "swish")
    return {
        **hf.sizes(s),
        **hf.rope(s, theta, known),
        **(hf.head_sizes(s) if s.has("head_dim") else {}),
        "vocab_size": ("u32", s.integer("vocab_size", high=1 << 31)),
        "rope.dimension_count": ("u32", hf.head_size(s)),
    }


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
