"""gpt-oss: attention with sinks, a window in every second layer, biases everywhere, and experts
with an activation of their own.

The norm before the experts is stored under the name that other architectures use for a norm after
the attention.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .config import MAX_CONTEXT
from .layers import attention, moe
from .layers.attention import OUTPUT_BIAS, QKV_BIAS, SINKS, AttentionSettings
from .layers.moe import EXPERT_BIAS, ROUTER_BIAS, MoESettings, read_router
from .rope import build_local_rope, build_rope, read_rope

PERIOD = 2  # every second layer sees everything
NORM, STORED_AS = "ffn_norm.weight", "post_attention_norm.weight"
ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0},
}


def read(c: Context) -> ModelSettings:
    """Layers with a window have the same scaling of rope as the others."""
    config, n_layer = c.config, c.sizes.n_layer
    window = config.integer("attention.sliding_window", high=MAX_CONTEXT)
    rope = read_rope(config, c.sizes, "neox")
    scale = c.sizes.layer.key_size**-0.5
    whole = AttentionSettings(scale, build_rope(rope))
    windowed = AttentionSettings(scale, build_local_rope(config, rope), window)
    ffn = MoESettings(read_router(config, c.sizes, "softmax_chosen"), "swiglu_oai")
    layers = config.windowed_layers(n_layer, PERIOD)
    return ModelSettings([LayerSettings(windowed if x else whole, ffn) for x in layers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """A file does not say which layers have windows: they take turns.

    transformers does not round the ends of YaRN's ramp to whole pairs (truncate), all runtimes of
    GGUF do: logits differ slightly.
    """
    s.only("hidden_act", "silu")
    s.only("swiglu_alpha", 1.702)
    s.only("swiglu_limit", 7.0)
    s.raw("experts_per_token")  # num_experts_per_tok again
    s.raw("initial_context_length")  # of rope, which says it itself
    sliding = hf.sliding_layers(s)
    if sliding not in (None, [i % PERIOD == 0 for i in range(s.integer("num_hidden_layers"))]):
        raise s.refuse("layer_types", "windows in every second layer from the first on are")
    found = {**hf.sizes(s), **hf.rope(s, 150000.0, ("truncate",), ROPE), **hf.head_sizes(s)}
    found |= hf.experts(s)
    found["expert_feed_forward_length"] = ("u32", s.integer("intermediate_size"))
    found["attention.sliding_window"] = ("u32", hf.window_of(s))
    return found


ARCHITECTURE = Architecture(
    "gpt-oss",
    read,
    layer={
        **{**attention.TENSORS, **moe.TENSORS, **QKV_BIAS, **OUTPUT_BIAS},
        **{**SINKS, **ROUTER_BIAS, **EXPERT_BIAS},
    },
    fused={STORED_AS: (NORM,)},
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "GptOssForCausalLM": {
                **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
                **{"sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
                "rms_norm_eps": 1e-5,
            }
        },
        settings=settings,
        layer={
            **{k: v for k, v in {**hf.ATTENTION, **hf.EXPERTS, **hf.QKV_BIAS}.items() if k != NORM},
            STORED_AS: hf.LAYER[NORM],
            "attn_output.bias": "self_attn.o_proj.bias",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp.weight": "mlp.router.weight",
            "ffn_gate_inp.bias": "mlp.router.bias",
            **{f"ffn_{x}_exps.bias": f"mlp.experts.{x}_proj.bias" for x in ("gate", "up", "down")},
        },
        transposed=True,
        interleaved=True,
    ),
)
