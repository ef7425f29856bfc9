"""glm4moe: GLM-4.5 to 4.7: experts after a few dense layers, chosen by sigmoids with a bias of the
choice, and a shared expert.

Half of each head is rotated. Some files have blocks for multi-token prediction after the layers;
they are not used.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .glm4 import ROTATED_SHARE
from .layers import attention, dense, moe
from .layers.attention import QK_NORM, QKV_BIAS
from .layers.dense import DenseSettings
from .layers.moe import MoESettings, read_router
from .rope import SECTIONS

NORM, STORED_AS = "ffn_norm.weight", "post_attention_norm.weight"
EXPERTS = {**moe.TENSORS, **moe.CHOICE_BIAS, **moe.SHARED}
CHECKPOINT = {
    **{k: v for k, v in {**hf.LAYER, **hf.EXPERTS}.items() if k != NORM},
    **{**hf.SHARED, **hf.QKV_BIAS, **hf.QK_NORM, STORED_AS: hf.LAYER[NORM]},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def read(c: Context) -> ModelSettings:
    """Reads sections of rope, which models for images have, but does not use them."""
    c.config.raw(SECTIONS)
    return read_layers(c)


def read_layers(c: Context) -> ModelSettings:
    """llama's attention with rope of style "neox", and feed_forwards."""
    mixer = llama.attention(c, "neox")
    return ModelSettings([LayerSettings(mixer, ffn) for ffn in feed_forwards(c)])


def feed_forwards(c: Context) -> list[DenseSettings | MoESettings]:
    """The feed-forwards. The file may set the router's score, normalisation and scale."""
    experts = MoESettings(read_router(c.config, c.sizes, "sigmoid", says=moe.SETTINGS))
    return moe.feed_forwards(c.sizes, experts)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Whether q and k have norms is known from the tensors."""
    s.only("hidden_act", "silu", "swish")
    s.raw("use_qk_norm")
    return {
        **{**hf.sizes(s), **hf.head_sizes(s), **hf.experts(s), **router(s)},
        **hf.partial_rope(s, 10000.0, ROTATED_SHARE),
        moe.SHARED_COUNT: ("u32", s.integer("n_shared_experts", low=0)),
        moe.N_DENSE: ("u32", s.integer("first_k_dense_replace", low=0)),
    }


def router(
    s: hf.CheckpointSettings, n_group: int | None = None, normalise: bool = True
) -> hf.Metadata:
    """A router by sigmoids. n_group: of experts, and of those that are used, where nothing says so;
    None: it has to. normalise: the same, whether weights add up to 1.
    """
    return {
        "expert_group_count": ("u32", s.integer("n_group", n_group)),
        "expert_group_used_count": ("u32", s.integer("topk_group", n_group)),
        moe.SCORE: ("u32", 2),
        moe.SCALE: ("f32", s.real("routed_scaling_factor")),
        moe.NORM: ("bool", s.flag("norm_topk_prob", normalise)),
    }


ARCHITECTURE = Architecture(
    "glm4moe",
    read,
    layer={**attention.TENSORS, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **EXPERTS},
    optional_layer={**QKV_BIAS, **QK_NORM},
    fused={STORED_AS: (NORM,)},
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.N_DENSE},
    hugging_face=hf.HuggingFace(
        classes={
            "Glm4MoeForCausalLM": {
                **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_routed_experts": 128},
                **{"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1},
                **{"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
                **{"routed_scaling_factor": 1.0, "max_position_embeddings": 131072},
                "num_nextn_predict_layers": 1,
            }
        },
        settings=settings,
        layer=CHECKPOINT,
        nextn=("num_nextn_predict_layers", "num_mtp_layers"),
    ),
)
