"""bailingmoe2: Ling 2.0 and Ring 2.0: experts after a few dense layers, chosen among the best
groups by sigmoids with a bias of the choice; a shared expert; norms on each head of q and k.

The first half of each head is rotated. Some files have blocks for multi-token prediction after the
layers; they are not used.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import OUTPUT, Architecture, Context, ModelSettings
from .glm4moe import read_layers, router
from .layers import attention, dense, moe
from .layers.attention import QK_NORM

THETA, WIDTH = 6e5, "moe_shared_expert_intermediate_size"
QKV = "attn_qkv.weight"
UNUSED = (  # training, and precision
    *("embedding_dropout", "output_dropout", "mtp_loss_scaling_factor", "router_dtype"),
    *("moe_router_enable_expert_bias", "seq_aux", "max_window_layers"),
)
CHECKPOINT = {
    **{k: v for k, v in {**hf.LAYER, **hf.EXPERTS, **hf.SHARED}.items() if "self_attn" not in v},
    QKV: "attention.query_key_value.weight",
    "attn_output.weight": "attention.dense.weight",
    "attn_q_norm.weight": "attention.query_layernorm.weight",
    "attn_k_norm.weight": "attention.key_layernorm.weight",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
}


def read(c: Context) -> ModelSettings:
    """At most one shared expert is supported: with more, files disagree what their width means."""
    c.config.only(moe.SHARED_COUNT, 0, 1)
    return read_layers(c)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file; UnsupportedModel for what no published model has."""
    s.only("hidden_act", "silu", "swish")
    s.only("score_function", "sigmoid")
    s.only("scoring_func", "sigmoid")
    s.only("topk_method", "noaux_tc")
    s.only("num_shared_experts", 1)
    for key in ("use_qk_norm", "use_rmsnorm"):
        s.only(key, True)
    for key in ("use_bias", "use_qkv_bias", "use_sliding_window", "norm_head"):
        s.only(key, False)
    for key in UNUSED:
        s.raw(key)
    width = s.integer(WIDTH, s.integer("moe_intermediate_size"))
    return {
        **{**hf.sizes(s), **hf.head_sizes(s), **hf.experts(s), **router(s)},
        **hf.partial_rope(s, THETA, 0.5),
        "vocab_size": ("u32", s.integer("vocab_size", high=1 << 31)),
        moe.SHARED_COUNT: ("u32", 1),
        moe.SHARED_WIDTH: ("u32", width),
        moe.N_DENSE: ("u32", s.integer("first_k_dense_replace", low=0)),
    }


ARCHITECTURE = Architecture(
    "bailingmoe2",
    read,
    layer={**attention.TENSORS, **QK_NORM, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **QK_NORM, **moe.TENSORS, **moe.SHARED},
    optional=OUTPUT,
    optional_layer=moe.CHOICE_BIAS,
    fused={QKV: ("attn_q.weight", "attn_k.weight", "attn_v.weight")},
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.SHARED_WIDTH, moe.N_DENSE},
    hugging_face=hf.HuggingFace(
        classes={
            "BailingMoeV2ForCausalLM": {
                **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 256},
                **{"num_experts_per_tok": 8, "moe_intermediate_size": 512, "n_group": 8},
                **{"topk_group": 4, "num_shared_experts": 1, "first_k_dense_replace": 1},
                **{"routed_scaling_factor": 1.0, "max_position_embeddings": 32768},
                "vocab_size": 157184,
            }
        },
        settings=settings,
        layer=CHECKPOINT,
        outside={**hf.GLOBAL, "token_embd.weight": "model.word_embeddings.weight"},
        nextn=("num_nextn_predict_layers",),
    ),
)
