"""Small checkpoints of mixtures of experts, as checkpoints.py has them of dense models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from checkpoints import (
    KINDS,
    LLAMA3,
    N_VOCAB,
    Kind,
    _random,
    config_json,
    config_of,
    write_tokenizer,
    write_weights,
)

D, F, H, X, FX = 64, 96, 4, 8, 32
EXPERTS = {"num_experts": X, "num_experts_per_tok": 2, "moe_intermediate_size": FX}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": True},
}
MOE_KINDS = {
    "qwen3moe": Kind(
        *("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
        {**EXPERTS, "head_dim": 32, "norm_topk_prob": True, "rope_theta": 1e6},
        pre="qwen2",
    ),
    "qwen2moe": Kind(
        *("qwen2moe", "Qwen2MoeForCausalLM", "qwen2_moe"),
        {**EXPERTS, "shared_expert_intermediate_size": 48, "rope_theta": 1e6},
        pre="qwen2",
    ),
    "mixtral": Kind(
        *("llama", "MixtralForCausalLM", "mixtral"),
        {"num_local_experts": X, "num_experts_per_tok": 2, "sliding_window": None},
        shards=3,
    ),
    "gpt-oss": Kind(
        *("gpt-oss", "GptOssForCausalLM", "gpt_oss"),
        {
            **{"num_local_experts": X, "num_experts_per_tok": 2, "sliding_window": 8},
            **{"head_dim": 16, "rope_parameters": YARN, "attention_bias": True},
            **{"swiglu_limit": 7.0, "experts_per_token": 2, "initial_context_length": 64},
        },
        pre="gpt-4o",
    ),
    "glm4moe": Kind(  # with a block that predicts the token after the next
        *("glm4moe", "Glm4MoeForCausalLM", "glm4_moe"),
        {
            **{"n_routed_experts": X, "num_experts_per_tok": 2, "moe_intermediate_size": FX},
            **{"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
            **{"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": True},
            **{"head_dim": 24, "attention_bias": True, "rope_theta": 1e6},
            **{"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
        },
    ),
    "bailingmoe2": Kind(
        *("bailingmoe2", "BailingMoeV2ForCausalLM", "bailing_moe"),
        {
            **{**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
            **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "rope_theta": 6e5},
            **{"partial_rotary_factor": 0.5, "score_function": "sigmoid", "use_qk_norm": True},
            **{"moe_shared_expert_intermediate_size": FX, "router_dtype": "fp32"},
            **{"moe_router_enable_expert_bias": True, "norm_topk_prob": True, "use_bias": False},
        },
        pre="qwen2",
        shards=2,
    ),
    "dots1": Kind(
        *("dots1", "Dots1ForCausalLM", "dots1"),
        {
            **{"n_routed_experts": X, "num_experts_per_tok": 2, "moe_intermediate_size": FX},
            **{"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
            **{"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid"},
            **{"num_key_value_heads": H, "head_dim": 24, "rope_theta": 1e7},
            **{"sliding_window": None, "max_window_layers": 2},
        },
        pre="qwen2",
    ),
    "exaone-moe": Kind(
        *("exaone-moe", "ExaoneMoeForCausalLM", "exaone_moe"),
        {
            **{**EXPERTS, "num_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 24},
            **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
            **{"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": "LLLG"},
            **{"scoring_func": "sigmoid", "is_moe_layer": [False, True, True, True]},
            "layer_types": [f"{x}_attention" for x in (*("sliding",) * 3, "full")],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        pre="exaone-moe",
    ),
    "ernie4_5-moe": Kind(
        *("ernie4_5-moe", "Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        {
            **{"moe_num_experts": X, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 24},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "use_bias": False},
            **{"moe_layer_interval": 1, "moe_layer_end_index": -1, "rope_theta": 5e5},
        },
        *("spm", ""),
        tied=True,
    ),
    "hunyuan-moe": Kind(
        *("hunyuan-moe", "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
        {
            **{"num_experts": X, "moe_topk": [2, 2], "moe_intermediate_size": [F, F]},
            **{"num_shared_expert": [1, 1], "use_mixed_mlp_moe": True, "eod_token_id": 2},
            **{"head_dim": 24, "use_qk_norm": True, "rope_theta": 10000.0},
        },
    ),
    "minimax-m2": Kind(
        *("minimax-m2", "MiniMaxM2ForCausalLM", "minimax_m2"),
        {
            **{"num_local_experts": X, "num_experts_per_tok": 2, "intermediate_size": FX},
            **{"head_dim": 24, "rotary_dim": 12, "rope_theta": 5e6, "scoring_func": "sigmoid"},
            **{"use_qk_norm": True, "use_routing_bias": True, "attn_type_list": [1, 1]},
        },
        shards=2,
    ),
    "llama4": Kind(
        *("llama4", "Llama4ForCausalLM", "llama4_text"),
        {
            **{"num_local_experts": X, "num_experts_per_tok": 1, "intermediate_size": FX},
            **{"intermediate_size_mlp": F, "interleave_moe_layer_step": 2, "head_dim": 24},
            **{"num_hidden_layers": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
            **{"use_qk_norm": True, "attn_temperature_tuning": True, "attn_scale": 0.1},
            **{"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}, "rope_theta": 5e5},
            "no_rope_layers": [],
            **{"attention_bias": False, "moe_layers": [1, 3]},
        },
    ),
    "olmoe": Kind(
        *("olmoe", "OlmoeForCausalLM", "olmoe"),
        {
            **{"num_experts": X, "num_experts_per_tok": 3, "intermediate_size": FX},
            **{"norm_topk_prob": False, "clip_qkv": None, "num_key_value_heads": H},
        },
        pre="gpt-2",
    ),
    "granitemoe": Kind(
        *("granitemoe", "GraniteMoeForCausalLM", "granitemoe"),
        {**KINDS["granite"].config, "num_local_experts": X, "num_experts_per_tok": 2},
        tied=True,
    ),
    "granitemoe-shared": Kind(
        *("granitemoe", "GraniteMoeSharedForCausalLM", "granitemoeshared"),
        {
            **{**KINDS["granite"].config, "num_local_experts": X, "num_experts_per_tok": 3},
            "shared_intermediate_size": 48,
        },
    ),
    "qwen3vlmoe": Kind(  # gate and up of an expert are no square: which axis is which is plain
        *("qwen3vlmoe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
        {
            **{**KINDS["qwen3vl"].config, **EXPERTS, "moe_intermediate_size": 24},
            "norm_topk_prob": True,
        },
        pre="qwen2",
        inside={**(KINDS["qwen3vl"].inside or {}), "model_type": "qwen3_vl_moe"},
    ),
}


def write_moe(folder: Path, name: str, weights: Mapping[str, np.ndarray] | None = None,
              **changes: Any) -> Path:  # fmt: skip
    """Write the checkpoint `name`; `changes` replace settings, or remove them (None)."""
    kind = MOE_KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config_json(kind, **changes))
    write_weights(folder, moe_weights_of(name) if weights is None else weights, kind.dtype,
                  kind.shards)  # fmt: skip
    write_tokenizer(folder, kind.tokenizer, kind.pre)
    return folder


def moe_weights_of(name: str) -> dict[str, np.ndarray]:
    """{name in transformers: weights}, in float32 with values that are exact in bfloat16."""
    kind = MOE_KINDS[name]
    rng = np.random.default_rng(crc32(name.encode()))
    found = {}
    for key, shape in moe_shapes_of(name).items():
        bias = key if "sinks" not in key and not key.endswith("_bias") else "a.bias"
        found[key] = _random(rng, bias, shape, kind)
    return found


def moe_shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """{name in transformers: shape}."""
    table = "word_embeddings" if name == "bailingmoe2" else "embed_tokens"
    model = "model." if MOE_KINDS[name].inside is None else "model.language_model."
    found: dict[str, tuple[int, ...]] = {f"{model}{table}.weight": (N_VOCAB, D)}
    found[f"{model}norm.weight"] = (D,)
    if not MOE_KINDS[name].tied:
        found["lm_head.weight"] = (N_VOCAB, D)
    for i in range(config_of(MOE_KINDS[name])["num_hidden_layers"] + (name == "glm4moe")):
        found |= {f"{model}layers.{i}.{x}": shape for x, shape in _layer(name, i).items()}
    return found


def _layer(name: str, i: int) -> dict[str, tuple[int, ...]]:
    """Of layer i, or of the block after the last."""
    config = config_of(MOE_KINDS[name])
    size = config.get("head_dim", D // H)
    q, kv = H * size, config["num_key_value_heads"] * size
    widths = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    layer: dict[str, tuple[int, ...]] = {
        f"{x}_layernorm.weight": (D,) for x in ("input", "post_attention")
    }
    layer |= {f"self_attn.{x}.weight": shape for x, shape in widths.items()}
    qkv = ("q_proj", "k_proj", "v_proj")
    biases = {"qwen2moe": qkv, "gpt-oss": tuple(widths), "glm4moe": qkv}.get(name, ())
    layer |= {f"self_attn.{x}.bias": widths[x][:1] for x in biases}
    widths_of_norms = (q, kv) if name in ("minimax-m2", "olmoe") else (size, size)
    with_norms = "qwen3moe", "glm4moe", "minimax-m2", "dots1", "exaone-moe", "qwen3vlmoe", "olmoe"
    if name in with_norms:
        pairs = zip("qk", widths_of_norms, strict=True)
        layer |= {f"self_attn.{x}_norm.weight": (n,) for x, n in pairs}
    if name == "hunyuan-moe":
        layer |= {f"self_attn.{x}_layernorm.weight": (size,) for x in ("query", "key")}
    if name == "bailingmoe2":
        return _ling(i, q, kv, size)
    if name in ("dots1", "exaone-moe"):
        return layer | _sigmoids(i, "mlp." if name == "exaone-moe" else "mlp.gate.")
    if found := {"glm4moe": _glm, "ernie4_5-moe": _ernie, "llama4": _llama4}.get(name):
        return layer | found(i)
    others = {"mixtral": _mixtral, "gpt-oss": _gpt_oss, "hunyuan-moe": _hunyuan}
    others |= {"minimax-m2": _minimax, "qwen3vlmoe": _qwen3vl}
    others |= {"granitemoe": _granite, "granitemoe-shared": _granite}
    layer |= others.get(name, _qwen)()
    if name == "granitemoe-shared":
        layer |= {"shared_mlp.input_linear.weight": (2 * 48, D)}
        layer |= {"shared_mlp.output_linear.weight": (D, 48)}
    if name == "qwen2moe":
        layer |= {f"mlp.shared_expert.{x}_proj.weight": (48, D) for x in ("gate", "up")}
        layer["mlp.shared_expert.down_proj.weight"] = (D, 48)
        layer["mlp.shared_expert_gate.weight"] = (1, D)
    return layer


def _ling(i: int, q: int, kv: int, size: int) -> dict[str, tuple[int, ...]]:
    """A dense layer, and others of experts."""
    at = "attention."
    found = {f"{at}query_key_value.weight": (q + 2 * kv, D), f"{at}dense.weight": (D, q)}
    found |= {f"{at}{x}_layernorm.weight": (size,) for x in ("query", "key")}
    found |= {f"{x}_layernorm.weight": (D,) for x in ("input", "post_attention")}
    if i == 0:
        return found | _dense()
    bias = {"mlp.gate.expert_bias": (X,)}
    return {**found, **_qwen(), **bias, **_dense("mlp.shared_experts.", FX)}


def _sigmoids(i: int, at: str) -> dict[str, tuple[int, ...]]:
    """A dense layer, and others of experts with a bias of the choice."""
    if i == 0:
        return _dense()
    bias = {f"{at}e_score_correction_bias": (X,)}
    return {**_qwen(), **bias, **_dense("mlp.shared_experts.", 2 * FX)}


def _ernie(i: int) -> dict[str, tuple[int, ...]]:
    """A dense layer, and one of experts."""
    if i == 0:
        return _dense()
    bias = {"mlp.moe_statics.e_score_correction_bias": (1, X)}
    return {**_qwen(24), **bias, **_dense("mlp.shared_experts.", 48)}


def _llama4(i: int) -> dict[str, tuple[int, ...]]:
    """Dense layers and such of experts take turns."""
    at = "feed_forward."
    if i % 2 == 0:
        return _dense(at)
    experts = {"gate_up_proj": (X, D, 2 * FX), "down_proj": (X, FX, D)}
    found = {f"{at}experts.{x}": shape for x, shape in experts.items()}
    return {**found, f"{at}router.weight": (X, D), **_dense(f"{at}shared_expert.", FX)}


def _hunyuan() -> dict[str, tuple[int, ...]]:
    found = {**_qwen(F), "mlp.gate.wg.weight": (X, D), **_dense("mlp.shared_mlp.", F)}
    return {key: shape for key, shape in found.items() if key != "mlp.gate.weight"}


def _minimax() -> dict[str, tuple[int, ...]]:
    return {**_mixtral(FX), "block_sparse_moe.e_score_correction_bias": (X,)}


def _qwen(f: int = FX) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (f, D), "up_proj": (f, D), "down_proj": (D, f)}
    experts = {f"mlp.experts.{e}.{x}.weight": s for e in range(X) for x, s in shapes.items()}
    return {"mlp.gate.weight": (X, D), **experts}


def _granite() -> dict[str, tuple[int, ...]]:
    shapes = {"router.layer": (X, D), "input_linear": (X, 2 * F, D), "output_linear": (X, D, F)}
    return {f"block_sparse_moe.{x}.weight": shape for x, shape in shapes.items()}


def _qwen3vl() -> dict[str, tuple[int, ...]]:
    experts = {"gate_up_proj": (X, D, 2 * 24), "down_proj": (X, 24, D)}
    return {"mlp.gate.weight": (X, D), **{f"mlp.experts.{x}": s for x, s in experts.items()}}


def _dense(at: str = "mlp.", f: int = F) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (f, D), "up_proj": (f, D), "down_proj": (D, f)}
    return {f"{at}{x}.weight": s for x, s in shapes.items()}


def _glm(i: int) -> dict[str, tuple[int, ...]]:
    """A dense layer, one of experts, and the block after them."""
    if i == 0:
        return _dense()
    bias = {"mlp.gate.e_score_correction_bias": (X,)}
    found = {**_qwen(), **bias, **_dense("mlp.shared_experts.", 2 * FX)}
    if i == 1:
        return found
    head = {"embed_tokens.weight": (N_VOCAB, D), "shared_head.head.weight": (N_VOCAB, D)}
    norms = {f"{x}.weight": (D,) for x in ("enorm", "hnorm", "shared_head.norm")}
    return {**found, **head, **norms, "eh_proj.weight": (D, 2 * D)}


def _mixtral(f: int = F) -> dict[str, tuple[int, ...]]:
    shapes, at = {"w1": (f, D), "w2": (D, f), "w3": (f, D)}, "block_sparse_moe."
    experts = {f"{at}experts.{e}.{x}.weight": s for e in range(X) for x, s in shapes.items()}
    return {f"{at}gate.weight": (X, D), **experts}


def _gpt_oss() -> dict[str, tuple[int, ...]]:
    at = "mlp.experts."
    return {
        "self_attn.sinks": (H,),
        "mlp.router.weight": (X, D),
        "mlp.router.bias": (X,),
        f"{at}gate_up_proj": (X, D, 2 * F),
        f"{at}gate_up_proj_bias": (X, 2 * F),
        f"{at}down_proj": (X, F, D),
        f"{at}down_proj_bias": (X, D),
    }
