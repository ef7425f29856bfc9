"""exaone-moe: K-EXAONE: exaone4's attention, with a window in three of four layers and no rope in
the others, but with norms before attention and feed-forward; experts after a few dense layers,
chosen by sigmoids with a bias of the choice, and shared experts.

Some files have blocks for multi-token prediction after the layers; they are not used.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, ROPE_FREQS, Architecture, Context, LayerSettings, ModelSettings
from .config import MAX_CONTEXT
from .exaone4 import PERIOD, usual_settings
from .glm4moe import feed_forwards, router
from .layers import attention, dense, moe
from .layers.attention import QK_NORM

N_DENSE = ("first_k_dense_replace", "first_last_k_dense_replace")  # the second is an older name


def read(c: Context) -> ModelSettings:
    """The layers with a window are those with rope."""
    window = c.config.integer("attention.sliding_window", high=MAX_CONTEXT)
    pattern = c.config.windowed_layers(c.sizes.n_layer, PERIOD)
    windowed = replace(llama.attention(c, "neox"), window=window)
    whole = replace(windowed, window=0, rope=None)
    layers = zip(pattern, feed_forwards(c), strict=True)
    return ModelSettings([LayerSettings(windowed if x else whole, ffn) for x, ffn in layers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Lists of which layers have experts have to agree with the number of dense ones."""
    s.only("scoring_func", "sigmoid")
    s.only("topk_method", "noaux_tc")
    s.integer("sliding_window", high=MAX_CONTEXT)
    found = {**usual_settings(s), **hf.experts(s)}
    if found.setdefault("rope.scaling.type", ("str", "none"))[1] != "none":
        raise s.refuse("rope_scaling", "rope that is not scaled is")
    n_shared = s.integer("num_shared_experts", low=0)
    width = n_shared * s.integer("moe_intermediate_size")
    return {
        **{**found, **router(s)},
        moe.SHARED_COUNT: ("u32", n_shared),
        **({moe.SHARED_WIDTH: ("u32", width)} if n_shared else {}),
        moe.N_DENSE: ("u32", _n_dense(s)),
    }


def _n_dense(s: hf.CheckpointSettings) -> int:
    new, old = N_DENSE
    n = s.integer(new, s.integer(old, 1, low=0), low=0)
    has_experts = [i >= n for i in range(s.integer("num_hidden_layers"))]
    kinds = ["sparse" if x else "dense" for x in has_experts]
    for key, wanted in (("is_moe_layer", has_experts), ("mlp_layer_types", kinds)):
        if s.raw(key) not in (None, wanted):
            raise s.refuse(key, f"{n} dense layers and then experts are")
    return n


DEFAULTS = {
    **{"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    **{"max_position_embeddings": 2048, "vocab_size": 102400, "num_experts": 64},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
}
ARCHITECTURE = Architecture(
    "exaone-moe",
    read,
    layer={**attention.TENSORS, **QK_NORM, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **QK_NORM, **moe.TENSORS, **moe.SHARED},
    optional={**OUTPUT, **ROPE_FREQS},
    optional_layer=moe.CHOICE_BIAS,
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.SHARED_WIDTH, moe.N_DENSE},
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), DEFAULTS),
        settings=settings,
        layer={
            **{**hf.LAYER, **hf.EXPERTS, **hf.SHARED, **hf.QK_NORM},
            "exp_probs_b.bias": "mlp.e_score_correction_bias",
        },
        tensors=hf.rope_freqs,
        nextn=("num_nextn_predict_layers",),
        others=("mtp.",),
    ),
)
