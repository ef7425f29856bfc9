"""muse-glimmer: Muse Glimmer, texts only: norms before and after both attention and feed-forward,
norms on heads, a gate of the attention's output, and an RMS norm of embeddings.

Three of four layers have a window; the fourth sees everything and has no rope. The factor of q
after its norm is part of the norm's weights.
"""

from __future__ import annotations

import numpy as np

from . import hugging_face as hf
from .architecture import (
    LAYER,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers.attention import GATE, QK_NORM, AttentionSettings
from .layers.dense import DenseSettings
from .rope import build_rope, read_rope

PERIOD = 4  # every fourth layer sees everything
POST_EPS = 1e-8  # of the norms after attention and feed-forward
LOGIT_SCALE = "logit_scale"
OTHERS = ("vision_tower", "vision_adapter", "vision_projection")  # beside the text model
OFFSET = hf.Transform(function=lambda w: w + 1)  # of all norms but the last
DEFAULTS = {
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 131072, "vocab_size": 202048, "sliding_window": 2048},
    **{"final_logit_softcapping": 20.0, "qk_scale_factor": 3.87},
    "output_multiplier": 0.19611613513818404,
}


def read(c: Context) -> ModelSettings:
    """The window is required."""
    config, scale = c.config, c.sizes.layer.key_size**-0.5
    rope = read_rope(config, c.sizes, "norm")
    base = config.real("rope.freq_base_swa", rope.base, low=1.000001)
    window = config.integer("attention.sliding_window", high=MAX_CONTEXT)
    whole = AttentionSettings(scale, post_norm_eps=POST_EPS)
    local = AttentionSettings(
        scale, build_rope(rope.with_base(base)), window, post_norm_eps=POST_EPS
    )
    ffn = DenseSettings("silu", post_norm_eps=POST_EPS)
    pattern = config.windowed_layers(c.sizes.n_layer, PERIOD)
    return ModelSettings(
        [LayerSettings(local if x else whole, ffn) for x in pattern],
        soft_cap=config.real("final_logit_softcapping", 0.0),
        logit_scale=config.real(LOGIT_SCALE, low=1e-6),
        embedding_norm=True,
    )


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """UnsupportedModel for rope in layers without a window, or windows without it."""
    s.only("hidden_activation", "silu", "swish")
    s.only("post_norm_eps", POST_EPS)
    n_layer = s.integer("num_hidden_layers")
    windowed = hf.sliding_layers(s) or [(n_layer - 1 - i) % PERIOD != 0 for i in range(n_layer)]
    rope = hf.rope(s, 5e5)
    base = rope["rope.freq_base"][1]
    if s.has("layer_rope_theta") and s.numbers("layer_rope_theta") != [x * base for x in windowed]:
        raise s.refuse("layer_rope_theta", f"only {base:g} in windowed layers, 0 elsewhere, is")
    s.real("qk_scale_factor")  # of the norms that are made of it
    return {
        **{**hf.sizes(s), **rope, **hf.head_sizes(s)},
        "final_logit_softcapping": ("f32", s.real("final_logit_softcapping")),
        LOGIT_SCALE: ("f32", s.real("output_multiplier", low=1e-6)),
        "attention.sliding_window": ("u32", s.integer("sliding_window", high=MAX_CONTEXT)),
        "attention.sliding_window_pattern": ("arr[bool]", windowed),
    }


def norms(s: hf.CheckpointSettings) -> dict[str, np.ndarray]:
    """The weights of the norms of heads, which checkpoints do not have."""
    ones = np.ones(hf.head_size(s), np.float32)
    factors = {"attn_q_norm": s.real("qk_scale_factor"), "attn_k_norm": 1.0}
    layers = range(s.integer("num_hidden_layers"))
    return {
        f"blk.{i}.{stem}.weight": np.float32(x) * ones
        for i in layers
        for stem, x in factors.items()
    }


ARCHITECTURE = Architecture(
    "muse-glimmer",
    read,
    layer={**LAYER, **POST_NORM, **QK_NORM, **GATE},
    understands=frozenset({LOGIT_SCALE}),
    hugging_face=hf.HuggingFace(
        classes={"MuseGlimmerForConditionalGeneration": DEFAULTS},
        settings=settings,
        layer={**hf.LAYER, **hf.SANDWICH, "attn_gate.weight": "self_attn.gate_proj.weight"},
        tensors=norms,
        permuted=hf.PERMUTED,
        transforms=lambda sizes: dict.fromkeys(
            ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), OFFSET
        ),
        inserted="language_model.",
        others=tuple(f"{a}{b}." for a in ("", "model.") for b in OTHERS),
    ),
)
