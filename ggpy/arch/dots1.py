"""dots1: dots.llm1: qwen3 with experts behind a few dense layers, chosen by sigmoids with a bias of
the choice, and shared ones.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, dense, moe
from .layers.attention import QK_NORM
from .layers.dense import DenseSettings
from .layers.moe import MoESettings, read_router


def read(c: Context) -> ModelSettings:
    """The file may set the score, whether weights add up to 1, and their scale."""
    mixer = llama.attention(c, "neox")
    experts = MoESettings(read_router(c.config, c.sizes, "sigmoid", says=moe.SETTINGS))
    ffns = [experts if x.n_expert else DenseSettings("silu") for x in c.sizes.layers]
    return ModelSettings([LayerSettings(mixer, ffn) for ffn in ffns])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """What the bias of the choice is for is called the score in the published settings."""
    s.only("hidden_act", "silu", "swish")
    s.only("moe_layer_freq", 1)
    for key in ("scoring_func", "topk_method"):
        s.only(key, "sigmoid", "noaux_tc")
    _refuse_windows(s)
    return {
        **{**hf.sizes(s), **hf.rope(s), **hf.experts(s)},
        **(hf.head_sizes(s) if s.has("head_dim") else {}),
        "expert_group_count": ("u32", s.integer("n_group", 1)),
        "expert_group_used_count": ("u32", s.integer("topk_group", 1)),
        moe.SHARED_COUNT: ("u32", s.integer("n_shared_experts", low=0)),
        moe.N_DENSE: ("u32", s.integer("first_k_dense_replace", low=0)),
        moe.SCORE: ("u32", 2),
        moe.SCALE: ("f32", s.real("routed_scaling_factor")),
        moe.NORM: ("bool", s.flag("norm_topk_prob", False)),
    }


def _refuse_windows(s: hf.CheckpointSettings) -> None:
    """A file cannot say which layers have a window."""
    s.only("use_sliding_window", False)
    n_layer = s.integer("num_hidden_layers")
    first = s.integer("max_window_layers", n_layer, low=0)
    sliding = hf.sliding_layers(s) or [i >= first for i in range(n_layer)]
    if hf.window_of(s) and any(sliding):
        raise s.refuse("sliding_window", f"{sum(sliding)} layers would have a window")


ARCHITECTURE = Architecture(
    "dots1",
    read,
    layer={**attention.TENSORS, **QK_NORM, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **QK_NORM, **moe.TENSORS, **moe.SHARED},
    optional=OUTPUT,
    optional_layer=moe.CHOICE_BIAS,
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.N_DENSE},
    hugging_face=hf.HuggingFace(
        classes={
            "Dots1ForCausalLM": {
                **{"num_key_value_heads": 32, "first_k_dense_replace": 0},
                **{"routed_scaling_factor": 1.0, "sliding_window": 4096},
                **{"max_position_embeddings": 2048, "vocab_size": 152064},
                "max_window_layers": 62,
            }
        },
        settings=settings,
        layer={
            **{**hf.LAYER, **hf.EXPERTS, **hf.SHARED, **hf.QK_NORM},
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
)
