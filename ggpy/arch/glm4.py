"""glm4: the dense GLM-4 and Z1, and the text model of GLM-4.1V: sandwich norms, biases on q, k and
v, gate and up in one tensor.

Rope is on half of each head; its pairs are neighbours in checkpoints too, and halves in the files
of models that read images.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import LAYER, OUTPUT, POST_NORM, Architecture, Context, ModelSettings
from .rope import has_sections

ROTATED_SHARE = 0.5  # of a head, where config.json says none
PARTS = ("ffn_gate.weight", "ffn_up.weight")
SANDWICH = {
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
}


def read(c: Context) -> ModelSettings:
    """All layers are alike."""
    return llama.read(c, "neox" if has_sections(c.config) else "norm")


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of llama, with rope on a part of each head."""
    s.only("hidden_act", "silu", "swish")
    return {**hf.sizes(s), **hf.partial_rope(s, 10000.0, ROTATED_SHARE), **hf.head_sizes(s)}


ARCHITECTURE = Architecture(
    "glm4",
    read,
    layer={**LAYER, **POST_NORM},
    optional=OUTPUT,
    fused={"ffn_up.weight": PARTS},
    hugging_face=hf.HuggingFace(
        classes={
            "Glm4ForCausalLM": {
                **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
                **{"max_position_embeddings": 131072, "vocab_size": 151552},
            }
        },
        settings=settings,
        layer={
            **{k: v for k, v in {**hf.LAYER, **hf.QKV_BIAS}.items() if k not in PARTS},
            **SANDWICH,
        },
    ),
)
