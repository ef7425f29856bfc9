"""config.json of released models of the dense families: every key is understood, and what the less
obvious ones become.
"""

from __future__ import annotations

from typing import Any

import pytest

from ggpy.arch import UnsupportedModel, architectures
from ggpy.arch.hugging_face import CheckpointSettings
from ggpy.gguf import GGUFError

BASE = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352},
    **{"max_position_embeddings": 65536, "hidden_act": "silu", "use_cache": True},
    **{"attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16"},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "transformers_version": "4.57.0"},
}
RMS = {"rms_norm_eps": 1e-5}
LAYER_NORM = {"layer_norm_eps": 1e-5}
LLLG = ["sliding_attention"] * 3 + ["full_attention"]
YARN_OLMO = {
    **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
}
YARN_MINISTRAL = {
    **{"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0},
    **{"original_max_position_embeddings": 16384, "max_position_embeddings": 262144},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}
ALPHA = {
    **{"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
    **{"mscale": 1.0, "mscale_all_dim": 0.0},
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    "original_max_position_embeddings": 8192,
}
SECTIONS = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
# Class: what its config.json has beyond BASE, and settings that this becomes.
RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SmolLM3ForCausalLM": (
        {
            **{**RMS, "rope_theta": 5e6, "rope_scaling": None, "sliding_window": None},
            **{"use_sliding_window": False, "max_window_layers": 28, "no_rope_layer_interval": 4},
            **{"layer_types": ["full_attention"] * 8, "no_rope_layers": [1, 1, 1, 0] * 2},
            **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 2},
        },
        {"rope.freq_base": 5e6},
    ),
    "GraniteForCausalLM": (
        {
            **{**RMS, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0},
            **{"residual_multiplier": 0.22, "logits_scaling": 16.0, "rope_theta": 1e7},
        },
        {"attention.scale": 0.0078125, "residual_scale": 0.22, "logit_scale": 16.0},
    ),
    "GraniteMoeForCausalLM": (
        {
            **{"attention_multiplier": 0.015625, "embedding_multiplier": 12.0},
            **{"residual_multiplier": 0.22, "logits_scaling": 6.0, "rope_theta": 1500000},
            **{"num_local_experts": 40, "num_experts_per_tok": 8, "rope_scaling": None},
            **{"output_router_logits": False, "router_aux_loss_coef": 0.001},
        },
        {"expert_count": 40, "expert_used_count": 8, "logit_scale": 6.0},
    ),
    "Olmo3ForCausalLM": (
        {**RMS, "layer_types": LLLG * 2, "rope_scaling": YARN_OLMO, "rope_theta": 5e5},
        {"attention.sliding_window": 4096, "rope.scaling.factor": 8.0},
    ),
    "OlmoeForCausalLM": (
        {
            **{**RMS, "clip_qkv": None, "norm_topk_prob": False, "num_experts": 64},
            **{"num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "rope_scaling": None},
        },
        {"expert_count": 64, "expert_used_count": 8},
    ),
    "SeedOssForCausalLM": (
        {
            **{**RMS, "attention_bias": True, "attention_out_bias": False, "head_dim": 128},
            **{"residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}},
        },
        {"attention.key_length": 128},
    ),
    "Ernie4_5ForCausalLM": (
        {**RMS, "head_dim": 128, "use_bias": False, "compression_ratio": 1.0, "rope_scaling": None},
        {"rope.freq_base": 5e5},
    ),
    "HunYuanDenseV1ForCausalLM": (
        {
            **{**RMS, "rope_scaling": ALPHA, "head_dim": 128, "attention_head_dim": 128},
            **{"max_position_embeddings": 32768, "use_qk_norm": True, "use_cla": False},
            **{"cla_share_factor": 2, "dense_list": [4096, 0], "norm_type": "rms"},
            **{"org_vocab_size": 128167, "pool_type": "last", "eod_token_id": 127967},
            **{"position_embedding_xdrope": False, "use_rotary_pos_emb": True, "pad_id": 127961},
        },
        {"context_length": 262144, "rope.freq_base": pytest.approx(10000 * 1000 ** (128 / 126))},
    ),
    "Mistral3ForConditionalGeneration": (
        {**RMS, "model_type": "ministral3", "head_dim": 128, "rope_parameters": YARN_MINISTRAL},
        {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "Exaone4ForCausalLM": (
        {
            **{**RMS, "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
            **{"layer_types": LLLG * 2, "rope_scaling": LLAMA3, "rope_theta": 1000000},
        },
        {"attention.sliding_window_pattern": [True, True, True, False] * 2},
    ),
    "Glm4ForCausalLM": (
        {**RMS, "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        {"rope.dimension_count": 64},
    ),
    "Cohere2ForCausalLM": (
        {
            **{**LAYER_NORM, "cache_implementation": "hybrid", "head_dim": 128, "layer_switch": 4},
            **{"logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first"},
            **{"position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0},
            **{"sliding_window": 4096, "sliding_window_pattern": 4, "use_parallel_block": True},
            **{"use_gated_activation": True, "use_embedding_sharing": True},
        },
        {"attention.sliding_window": 4096, "logit_scale": 0.25},
    ),
    "CohereForCausalLM": (
        {
            **{**LAYER_NORM, "logit_scale": 0.0625, "rope_theta": 8e6, "use_qk_norm": False},
            "model_max_length": 131072,
        },
        {"context_length": 131072, "rope.scaling.type": "none"},
    ),
    "MuseGlimmerForConditionalGeneration": (
        {
            **{**RMS, "head_dim": 128, "hidden_act": None, "hidden_activation": "silu"},
            **{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            **{"sliding_window": 2048, "layer_types": LLLG * 2, "post_norm_eps": 1e-8},
            **{"layer_rope_theta": [5e5, 5e5, 5e5, 0] * 2, "qk_scale_factor": 3.87},
            **{"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404},
        },
        {
            **{"attention.sliding_window": 2048, "rope.freq_base": 5e5},
            **{"attention.sliding_window_pattern": ([True] * 3 + [False]) * 2},
            **{"final_logit_softcapping": 20.0, "logit_scale": 0.19611613513818404},
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        {
            **{**RMS, "attention_bias": False, "head_dim": 128, "rope_theta": 5000000},
            "rope_scaling": SECTIONS,
            "vision_config": {"depth": 24, "deepstack_visual_indexes": [5, 11, 17]},
        },
        {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3},
    ),
    "Qwen2VLForConditionalGeneration": (
        {
            **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6},
            **{"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 70},
            **{"vision_token_id": 9, "vision_config": {"depth": 32}, "image_token_id": 8},
            **{"video_token_id": 7, "vision_start_token_id": 6, "vision_end_token_id": 5},
        },
        {"rope.dimension_sections": [16, 24, 24, 0], "rope.freq_base": 1e6},
    ),
    "Qwen2_5_VLForConditionalGeneration": (  # as its page says for long texts
        {
            "rope_scaling": {
                **{"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4},
                "original_max_position_embeddings": 32768,
            },
            **{"rope_theta": 1e6, "layer_types": ["full_attention"] * 8},
        },
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        {
            **{"attention_bias": False, "head_dim": 128, "rope_theta": 5000000},
            **{"rope_scaling": SECTIONS, "decoder_sparse_step": 1, "mlp_only_layers": []},
            **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128},
            **{"num_experts_per_tok": 8, "vision_config": {"deepstack_visual_indexes": [8, 16]}},
        },
        {"expert_count": 128, "expert_feed_forward_length": 768, "n_deepstack_layers": 2},
    ),
    "GptOssForCausalLM": (
        {
            **{**RMS, "attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4},
            **{"initial_context_length": 4096, "num_local_experts": 32, "rope_theta": 150000},
            **{"layer_types": LLLG[2:] * 4, "sliding_window": 128, "swiglu_limit": 7.0},
            "rope_scaling": {**YARN_OLMO, "factor": 16.0, "attention_factor": None},
        },
        {"rope.scaling.factor": 16.0, "rope.freq_base": 150000},
    ),
    "Qwen3MoeForCausalLM": (  # Qwen3-Coder
        {
            **{"norm_topk_prob": True, "use_qk_norm": True, "qkv_bias": False, "rope_theta": 1e7},
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768},
            **{"shared_expert_intermediate_size": 0, "num_experts": 128, "head_dim": 128},
        },
        {"expert_feed_forward_length": 768},
    ),
    "MiniMaxM2ForCausalLM": (
        {
            **{"attn_type_list": [1] * 8, "head_dim": 128, "num_local_experts": 256},
            **{"rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
            **{"shared_moe_mode": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
            **{"num_mtp_modules": 3, "use_mtp": True, "qk_norm_type": "per_layer"},
        },
        {"rope.dimension_count": 64},
    ),
    "BailingMoeV2ForCausalLM": (
        {
            **{"rms_norm_eps": 1e-6, "rope_theta": 600000, "rope_scaling": None, "head_dim": 128},
            **{"embedding_dropout": 0.0, "output_dropout": 0.0, "first_k_dense_replace": 1},
            **{"moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512},
            **{"moe_router_enable_expert_bias": True, "norm_topk_prob": True, "n_group": 8},
            **{"num_experts": 256, "num_shared_experts": 1, "partial_rotary_factor": 0.5},
            **{"routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid"},
            **{"topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False},
            **{"use_rmsnorm": True, "max_window_layers": 20, "num_experts_per_tok": 8},
        },
        {"rope.dimension_count": 64, "expert_group_count": 8, "expert_weights_scale": 2.5},
    ),
    "Dots1ForCausalLM": (
        {
            **{**RMS, "n_group": None, "topk_group": None, "scoring_func": "noaux_tc"},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "rope_theta": 1e7},
            **{"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
            "use_sliding_window": False,
        },
        {"expert_gating_func": 2, "expert_group_count": 1, "leading_dense_block_count": 1},
    ),
    "ExaoneMoEForCausalLM": (
        {
            **{**RMS, "head_dim": 128, "rope_theta": 1000000, "first_last_k_dense_replace": 1},
            **{"is_moe_layer": [False] + [True] * 7, "layer_types": LLLG * 2, "n_group": 1},
            **{"moe_intermediate_size": 2048, "norm_topk_prob": True, "num_experts": 128},
            **{"num_experts_per_tok": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
            **{"scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc"},
            **{"sliding_window": 128, "sliding_window_pattern": "LLLG", "rope_scaling": None},
        },
        {"attention.sliding_window": 128, "expert_shared_feed_forward_length": 2048},
    ),
    "GemmaForCausalLM": (
        {**RMS, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None},
        {"attention.key_length": 256, "rope.freq_base": None},
    ),
    "Gemma2ForCausalLM": (
        {
            **{**RMS, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
            **{"sliding_window": 4096, "sliding_window_size": 4096, "head_dim": 256},
            **{"query_pre_attn_scalar": 256, "cache_implementation": "hybrid"},
        },
        {"attention.sliding_window": 4096},
    ),
    "Phi3ForCausalLM": (  # Phi-4-mini
        {
            **{**RMS, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
            **{"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75},
            "rope_scaling": {
                **dict.fromkeys(("long_factor", "short_factor"), [1.0] * 48),
                "type": "longrope",
            },
        },
        {"rope.dimension_count": 96},
    ),
}


def settings(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Values by the keys that files have below the architecture."""
    hf = next(
        a.hugging_face
        for a in architectures().values()
        if a.hugging_face and kind in a.hugging_face.classes
    )
    values = {**hf.classes[kind], **BASE, **config, "architectures": [kind]}
    s = CheckpointSettings(values, "config.json")
    found = hf.settings(s)
    s.flag("tie_word_embeddings", bool(hf.tied))
    s.integer("vocab_size")
    s.refuse_unread()
    return {key: value for key, (_, value) in found.items()}


@pytest.mark.parametrize("kind", RELEASED)
def test_every_key_of_a_released_model_is_understood(kind: str) -> None:
    config, wanted = RELEASED[kind]
    found = settings(kind, config)
    assert {key: found.get(key) for key in wanted} == wanted


WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "layer_types": LLLG * 2}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0] * 8}, "no_rope_layers = .*every 4th"),
        ("SmolLM3ForCausalLM", WINDOWS, "use_sliding_window = True"),
        ("SeedOssForCausalLM", {"attention_out_bias": True}, "attention_out_bias = True"),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias = True"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla = True"),
        (
            "Mistral3ForConditionalGeneration",
            {"rope_parameters": {**YARN_MINISTRAL, "mscale": 0.5}},
            r"rope_parameters\.mscale = 0\.5",
        ),
        ("Mistral3ForConditionalGeneration", {"sliding_window": 5}, "sliding_window = 5"),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 3}, "sliding_window_pattern = 3"),
        ("MuseGlimmerForConditionalGeneration", {"post_norm_eps": 1e-5}, "post_norm_eps = 1e-05"),
        (
            "MuseGlimmerForConditionalGeneration",
            {"layer_rope_theta": [5e5] * 8},
            "layer_rope_theta = .*only 500000 in windowed layers",
        ),
        (
            "CohereForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling = .*without scaling",
        ),
        ("Olmo3ForCausalLM", {"clip_qkv": 8}, "clip_qkv = 8"),
        ("Exaone4ForCausalLM", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier = 0"),
    ],
)
def test_what_a_file_cannot_say_is_refused(kind: str, changes: dict, message: str) -> None:
    with pytest.raises((UnsupportedModel, GGUFError), match=message):
        settings(kind, {**RELEASED[kind][0], **changes})
