"""minimax-m2: MiniMax-M2: experts in every layer, chosen by sigmoids with a bias of the choice;
norms of q and k over all heads together.

Only the first elements of each head are rotated.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, moe
from .layers.attention import WHOLE_QK_NORM
from .layers.moe import MoESettings, read_router

THETA = 5e6
ROTATED = "rotary_dim"
UNUSED = (  # of blocks that predict further tokens, and of MiniMax-01
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list"),
    *("mlp_intermediate_size", "max_model_len", "qk_norm_type", "shared_moe_mode"),
    *(f"layernorm_{x}_{y}" for x in ("full_attention", "linear_attention", "mlp")
      for y in ("alpha", "beta")),
)  # fmt: skip


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1."""
    mixer = replace(llama.attention(c, "neox"), norm_whole=True)
    router = read_router(c.config, c.sizes, "sigmoid", normalise=True, says={moe.SCORE})
    return ModelSettings([LayerSettings(mixer, MoESettings(router))] * c.sizes.n_layer)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. The rotated part of a head is given in elements or as a share."""
    s.only("hidden_act", "silu", "swish")
    s.only("scoring_func", "sigmoid")
    s.only("shared_intermediate_size", 0)
    s.only("use_qk_norm", True)
    s.only("use_routing_bias", True)
    for key in UNUSED:
        s.raw(key)
    if set(s.raw("attn_type_list") or [1]) != {1}:
        raise s.refuse("attn_type_list", "only 1, attention with a softmax, is")
    size = hf.head_size(s)
    share = hf.rotated_share(s, hf.rope_part(s, THETA))
    n_rot = s.integer(ROTATED, int(share * size), high=size)
    return {
        **{**hf.sizes(s), **hf.head_sizes(s), **hf.experts(s)},
        **hf.rope(s, THETA, (hf.ROTATED_SHARE,)),
        "expert_feed_forward_length": ("u32", s.integer("intermediate_size")),
        "rope.dimension_count": ("u32", n_rot),
        moe.SCORE: ("u32", 2),
    }


ARCHITECTURE = Architecture(
    "minimax-m2",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **moe.CHOICE_BIAS, **WHOLE_QK_NORM},
    optional=OUTPUT,
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "MiniMaxM2ForCausalLM": {
                **{"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256},
                **{"num_experts_per_tok": 8, "max_position_embeddings": 196608},
                "vocab_size": 200064,
            }
        },
        settings=settings,
        layer={
            **{**hf.ATTENTION, **hf.QK_NORM, **llama.MIXTRAL},
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
)
