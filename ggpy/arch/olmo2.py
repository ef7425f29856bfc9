"""olmo2: OLMo 2 and 3: norms after attention and feed-forward instead of before them; norms of q
and k over all heads together.

OLMo 3 has a window in three of four layers, whose rope is never scaled.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import (
    LAYER,
    OUTPUT,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers.attention import WHOLE_QK_NORM
from .layers.dense import DenseSettings
from .rope import build_rope, read_rope

PERIOD = 4  # every fourth layer sees everything
THETA_3 = 5e5
NORMS = ("attn_norm.weight", "ffn_norm.weight")  # of others, before attention and feed-forward
BEHIND = {  # the norms after attention and feed-forward: names in files -> in checkpoints
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def read(c: Context) -> ModelSettings:
    """If the file has no window, no layer has one, and all layers have the same rope."""
    whole = replace(llama.attention(c, "neox"), norm_whole=True)
    window = c.config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    rope = read_rope(c.config, c.sizes, "neox")
    base = c.config.real("rope.freq_base_swa", rope.base, low=1.000001)
    windowed = replace(whole, rope=build_rope(rope.with_base(base)), window=window)
    local = [window > 0 and x for x in c.config.windowed_layers(c.sizes.n_layer, PERIOD)]
    ffn = DenseSettings("silu")
    return ModelSettings([LayerSettings(windowed if x else whole, ffn) for x in local])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Olmo3 has windows; rope is not scaled in layers with a window."""
    s.only("hidden_act", "silu", "swish")
    s.only("clip_qkv", 0)
    if s.raw("architectures") != ["Olmo3ForCausalLM"]:
        return {**hf.sizes(s), **hf.rope(s)}
    found = {**hf.sizes(s), **hf.rope(s, THETA_3)}
    base = s.real("rope_theta", THETA_3, low=1.000001)
    if s.part("rope_parameters").has("sliding_attention"):
        local = hf.rope_part(s, THETA_3, "sliding_attention")
        local.only("rope_type", "default")
        base = local.real("rope_theta", low=1.000001)
        local.refuse_unread()
    found["rope.freq_base_swa"] = ("f32", base)
    if window := hf.window_of(s):
        found["attention.sliding_window"] = ("u32", window)
        pattern = hf.windows_in_layers(s, PERIOD)
        found["attention.sliding_window_pattern"] = ("arr[bool]", pattern)
    return found


ARCHITECTURE = Architecture(
    "olmo2",
    read,
    layer={k: v for k, v in {**LAYER, **POST_NORM, **WHOLE_QK_NORM}.items() if k not in NORMS},
    optional=OUTPUT,
    hugging_face=hf.HuggingFace(
        classes={
            "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
            "Olmo3ForCausalLM": {
                **{"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096}
            },
        },
        settings=settings,
        layer={k: v for k, v in {**hf.LAYER, **BEHIND, **hf.QK_NORM}.items() if k not in NORMS},
    ),
)
