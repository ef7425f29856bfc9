"""command-r: Command R and Aya: layer norms, one for both attention and feed-forward, which are in
parallel.

Rope's pairs are neighbours in its checkpoints too, so that converters permute nothing.
"""

from __future__ import annotations

from . import architecture, llama
from . import hugging_face as hf
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .config import MAX_CONTEXT
from .layers.dense import DenseSettings

LOGIT_SCALE = "logit_scale"
UNDERSTOOD = frozenset({LOGIT_SCALE})
FFN = DenseSettings("silu", norm="attn_norm")
LAYER = {k: v for k, v in architecture.LAYER.items() if k != "ffn_norm.weight"}
CHECKPOINT = {k: v for k, v in hf.LAYER.items() if k != "ffn_norm.weight"}
DEFAULTS = {
    **{"layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "vocab_size": 256000},
    **{"logit_scale": 0.0625},
}
THETA = 5e5


def read(c: Context) -> ModelSettings:
    """Every layer sees everything."""
    layer = LayerSettings(llama.attention(c), FFN, parallel=True)
    scale = c.config.real(LOGIT_SCALE, 0.0) or 1.0
    return ModelSettings([layer] * c.sizes.n_layer, logit_scale=scale)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Aya's and Command R's; Command R+ has norms on q and k that are not supported."""
    s.only("use_qk_norm", False)
    found = usual_settings(s, THETA)
    if s.has("model_max_length"):  # the context, where max_position_embeddings is too low
        found["context_length"] = ("u32", s.integer("model_max_length", high=MAX_CONTEXT))
    return found


def usual_settings(s: hf.CheckpointSettings, theta: float) -> hf.Metadata:
    """Of both kinds of Command R; theta: rope's base."""
    s.only("hidden_act", "silu", "swish")
    rope = hf.rope(s, theta)
    if hf.rope_kind(hf.rope_part(s, theta)) != "default":
        key = "rope_parameters" if s.has("rope_parameters") else "rope_scaling"
        raise s.refuse(key, "only rope without scaling is")
    return {
        **hf.sizes(s, layer_norm=True),
        **rope,
        "logit_scale": ("f32", s.real("logit_scale", low=1e-6)),
        "rope.scaling.type": ("str", "none"),
    }


ARCHITECTURE = Architecture(
    "command-r",
    read,
    layer=LAYER,
    optional={},
    understands=UNDERSTOOD,
    layer_norm=True,
    hugging_face=hf.HuggingFace(
        classes={"CohereForCausalLM": DEFAULTS}, settings=settings, layer=CHECKPOINT, tied=True
    ),
)
