"""ernie4_5-moe: ernie4_5 with experts after a few dense layers, in some files in every nth layer
only; they are chosen by a softmax with a bias of the choice. There are shared experts, too.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .ernie4_5 import settings as dense_settings
from .layers import attention, dense, moe
from .layers.moe import MoESettings, read_router

UNUSED = (  # training, a sum that is never so small, and blocks that are left out
    *("moe_capacity", "moe_gate", "moe_use_aux_free", "moe_norm_min"),
    "num_nextn_predict_layers",
)


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1."""
    mixer = llama.attention(c)
    experts = MoESettings(read_router(c.config, c.sizes, normalise=True))
    ffns = moe.feed_forwards(c.sizes, experts)
    return ModelSettings([LayerSettings(mixer, ffn) for ffn in ffns])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """UnsupportedModel if layers at the end have no experts, which a file cannot say."""
    n_layer = s.integer("num_hidden_layers")
    s.only("moe_layer_end_index", -1, n_layer - 1)
    for key in UNUSED:
        s.raw(key)
    n_shared = s.integer("moe_num_shared_experts", low=0)
    width = n_shared * s.integer("moe_intermediate_size")
    return {
        **{**dense_settings(s), **hf.experts(s)},
        moe.PERIOD: ("u32", s.integer("moe_layer_interval")),
        moe.N_DENSE: ("u32", s.integer("moe_layer_start_index", low=0)),
        moe.SHARED_COUNT: ("u32", n_shared),
        **({moe.SHARED_WIDTH: ("u32", width)} if n_shared else {}),
    }


DEFAULTS = {
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    **{"vocab_size": 103424, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
    **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1},
}
ARCHITECTURE = Architecture(
    "ernie4_5-moe",
    read,
    layer={**attention.TENSORS, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **moe.TENSORS, **moe.SHARED},
    optional=OUTPUT,
    optional_layer={**llama.BIASES, **moe.CHOICE_BIAS},
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.SHARED_WIDTH, moe.N_DENSE, moe.PERIOD},
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(("Ernie4_5_MoeForCausalLM", "Ernie4_5MoeForCausalLM"), DEFAULTS),
        settings=settings,
        layer={
            **{**hf.LAYER, **hf.EXPERTS, **hf.SHARED},
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        tied=True,
        others=("model.mtp_",),
    ),
)
