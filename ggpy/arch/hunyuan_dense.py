"""hunyuan-dense: qwen3 with the norms of q and k after rope; the base of rope is stretched by a
fixed factor.
"""

from __future__ import annotations

from dataclasses import replace

from ..gguf import GGUFError
from . import hugging_face as hf
from .architecture import LAYER, OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .layers.attention import QK_NORM, AttentionSettings
from .layers.dense import DenseSettings
from .rope import RopeSettings, build_rope, read_rope

CONTEXT = 256 * 1024  # tokens of models with a stretched base: their config.json has other numbers
NORMS = {
    "attn_q_norm.weight": "self_attn.query_layernorm.weight",
    "attn_k_norm.weight": "self_attn.key_layernorm.weight",
}
# What config.json says beside the model, or of what every one of them has
UNUSED = (
    *("add_classification_head", "attention_head_dim", "class_num", "cla_share_factor"),
    *("dense_list", "enable_lm_head_fp32", "eod_token_id", "im_end_id", "im_newline_id"),
    *("im_start_id", "mask_init_id", "norm_type", "org_vocab_size", "pool_type", "text_end_id"),
    *("text_start_id", "use_qk_norm", "use_rotary_pos_emb", "sep_token_id", "pad_id"),
    "image_token_id",
)


def read(c: Context) -> ModelSettings:
    """rope.scaling.alpha stretches the base of rope to base * alpha^(E / (E - 2))."""
    rope = read_rope(c.config, c.sizes, "neox")
    size = c.sizes.layer.key_size
    if alpha := c.config.real("rope.scaling.alpha", 0.0):
        if size <= 2:
            raise GGUFError(f"{c.config.path}: heads of {size} cannot have a rope.scaling.alpha")
        rope = replace(rope, base=stretched(rope.base, alpha, size))
    return ModelSettings([LayerSettings(mixer(c, rope), DenseSettings("silu"))] * c.sizes.n_layer)


def mixer(c: Context, rope: RopeSettings) -> AttentionSettings:
    """Attention with this rope, and norms of q and k after it."""
    scale = c.sizes.layer.key_size**-0.5
    return AttentionSettings(scale, build_rope(rope), norm_after_rope=True)


def stretched(base: float, alpha: float, size: int) -> float:
    """The base of rope with NTK-aware scaling, for heads of this size."""
    return float(base * alpha ** (size / (size - 2)))


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. With an alpha, rope_type "dynamic" does not depend on the length."""
    s.only("hidden_act", "silu", "swish")
    s.only("use_cla", False)
    for key in UNUSED:
        s.raw(key)
    found = {**hf.sizes(s), **hf.head_sizes(s)}
    part = hf.rope_part(s, 10000.0)
    if hf.rope_kind(part) != "dynamic":
        return {**found, **hf.rope(s)}
    base, alpha = part.real("rope_theta", low=1.000001), part.real("alpha", low=1e-6)
    base = stretched(base, alpha, hf.head_size(s))
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        part.raw(key)  # without effect beside alpha
    part.refuse_unread()
    return {
        **found,
        "context_length": ("u32", CONTEXT),
        "rope.freq_base": ("f32", base),
        "rope.scaling.type": ("str", "none"),
        "rope.scaling.factor": ("f32", 1.0),
        "rope.scaling.original_context_length": ("u32", CONTEXT),
    }


ARCHITECTURE = Architecture(
    "hunyuan-dense",
    read,
    layer={**LAYER, **QK_NORM},
    optional=OUTPUT,
    hugging_face=hf.HuggingFace(
        classes={"HunYuanDenseV1ForCausalLM": {"rms_norm_eps": 1e-5}},
        settings=settings,
        layer={**hf.LAYER, **NORMS},
    ),
)
