"""llama: Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM2 and other models that are converted
under this name.

Converters permute the rows of q and k, so rope's pairs are neighbours: style "norm".
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..formats import by_name
from ..gguf import Tensor
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
from .config import MAX_CONTEXT, MAX_LAYERS, Config
from .layers import moe
from .layers.attention import OUTPUT_BIAS, QKV_BIAS, AttentionSettings
from .layers.attention import TENSORS as ATTENTION
from .layers.dense import DenseSettings
from .layers.moe import MoESettings, read_router
from .rope import Style, build_rope, choose_factors, read_rope

WINDOWED = (["MistralForCausalLM"], ["MixtralForCausalLM"])  # classes whose layers may have windows
BIASES = {**QKV_BIAS, **OUTPUT_BIAS}
MIXTRAL = {
    "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.w1.weight",
    "ffn_down_exps.weight": "block_sparse_moe.experts.w2.weight",
    "ffn_up_exps.weight": "block_sparse_moe.experts.w3.weight",
}


def adapt(config: Config, tensors: dict[str, Tensor]) -> None:
    """Makes a feed-forward with biases (Granite Code) a single expert that every token takes,
    because only experts may have biases.
    """
    parts = tuple(f"ffn_{part}" for part in ("gate", "up", "down"))
    n_layer = config.integer("block_count", high=MAX_LAYERS)
    names = [(f"blk.{i}.", part) for i in range(n_layer) for part in parts]
    if not all(f"{at}{part}.{x}" in tensors for at, part in names for x in ("weight", "bias")):
        return
    config.assume({"expert_count": 1, "expert_used_count": 1})
    for at, part in names:
        for kind in ("weight", "bias"):
            x, name = tensors.pop(f"{at}{part}.{kind}"), f"{at}{part}_exps.{kind}"
            tensors[name] = replace(x, name=name, shape=(1, *x.shape), data=x.data[None])
    for i in range(n_layer):
        width = tensors[f"blk.{i}.ffn_up_exps.weight"].shape[-1]
        name, zeros = f"blk.{i}.ffn_gate_inp.weight", np.zeros((1, 4 * width), np.uint8)
        tensors[name] = Tensor(name, (1, width), by_name("F32"), zeros)


def read(c: Context, style: Style = "norm") -> ModelSettings:
    """All layers are alike: the same rope, and the same window if the file has one."""
    window = c.config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    ffn = _experts(c) if c.sizes.layer.n_expert else DenseSettings("silu")
    layer = LayerSettings(replace(attention(c, style), window=window), ffn)
    return ModelSettings([layer] * c.sizes.n_layer)


def attention(c: Context, style: Style = "norm") -> AttentionSettings:
    """Attention over the whole context, with any scaling of rope."""
    settings = read_rope(c.config, c.sizes, style)
    rope = build_rope(settings, choose_factors(settings, c.tensors, c.n_ctx))
    scale = c.config.real("attention.scale", 0.0) or c.sizes.attention.key_size**-0.5
    return AttentionSettings(scale, rope)


def _experts(c: Context) -> MoESettings:
    """Mixtral's experts; the weights of the chosen ones add up to 1."""
    return MoESettings(read_router(c.config, c.sizes, normalise=True))


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. A window counts in models of class Mistral only, even if another
    model sets it; Mixtral has experts.
    """
    found = {**usual_settings(s), **hf.head_sizes(s)}
    if s.raw("architectures") in WINDOWED and (window := hf.window_of(s)):
        found["attention.sliding_window"] = ("u32", window)
    if s.raw("architectures") == ["MixtralForCausalLM"]:
        found |= hf.experts(s)
    return found


def usual_settings(
    s: hf.CheckpointSettings, theta: float = 10000.0, known: tuple[str, ...] = ()
) -> hf.Metadata:
    """The settings that llama.cpp writes for all kinds of Llama; theta, known: see hf.rope."""
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
    layer=LAYER,
    expert_layer={**ATTENTION, **moe.TENSORS},
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    optional_layer={**BIASES, **moe.EXPERT_BIAS},
    adapt=adapt,
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
