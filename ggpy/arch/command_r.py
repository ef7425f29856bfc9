"""command-r: Command R, Command R+ and Aya: attention and feed-forward in parallel, after one layer
norm. Command R+ also has layer norms on each head of q and k.

Rope's pairs are neighbours in its checkpoints, too, so converters do not permute rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import architecture, llama
from . import hugging_face as hf
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .config import MAX_CONTEXT, Dimensions
from .layers.attention import QK_NORM_BY_HEAD, QKV_BIAS
from .layers.dense import DenseSettings

LOGIT_SCALE = "logit_scale"
UNDERSTOOD = frozenset({LOGIT_SCALE})
FFN = DenseSettings("silu", norm="attn_norm")
LAYER = {k: v for k, v in architecture.LAYER.items() if k != "ffn_norm.weight"}
CHECKPOINT = {k: v for k, v in hf.LAYER.items() if k != "ffn_norm.weight"}
WITH_NORMS = {**CHECKPOINT, **hf.QK_NORM}
DEFAULTS = {
    **{"layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "vocab_size": 256000},
    **{"logit_scale": 0.0625},
}
THETA = 5e5
N_LAYER_PLUS = 64  # from so many layers on, heads of q and k have norms


def read(c: Context) -> ModelSettings:
    """All layers see the whole context."""
    mixer = replace(llama.attention(c), norm_by_head=True)  # if they have norms
    layer = LayerSettings(mixer, FFN, parallel=True)
    scale = c.config.real(LOGIT_SCALE, 0.0) or 1.0
    return ModelSettings([layer] * c.sizes.n_layer, logit_scale=scale)


def more(sizes: Dimensions, layer: int | None) -> Mapping[str, str]:
    """The norms of heads that Command R+ needs."""
    plus = layer is not None and sizes.n_layer >= N_LAYER_PLUS
    return QK_NORM_BY_HEAD if plus else {}


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Whether q and k have norms is known from the tensors."""
    s.flag("use_qk_norm", False)
    found = usual_settings(s, THETA)
    if s.has("model_max_length"):  # the context, where max_position_embeddings is too low
        found["context_length"] = ("u32", s.integer("model_max_length", high=MAX_CONTEXT))
    return found


def usual_settings(s: hf.CheckpointSettings, theta: float) -> hf.Metadata:
    """The settings that command-r and cohere2 share. theta: the base of rope."""
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
    optional_layer={**QKV_BIAS, **QK_NORM_BY_HEAD},
    more=more,
    understands=UNDERSTOOD,
    layer_norm=True,
    hugging_face=hf.HuggingFace(
        classes={"CohereForCausalLM": DEFAULTS}, settings=settings, layer=WITH_NORMS, tied=True
    ),
)
