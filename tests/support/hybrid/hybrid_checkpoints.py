"""Small checkpoints of models with gated delta nets, as checkpoints.py has them of dense models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from checkpoints import N_VOCAB, TIE, Kind, config_of, write_tokenizer, write_weights

D, F, H, G, E = 64, 96, 4, 2, 32
HK, HV, S, TAPS = 2, 6, 16, 4
X, FX, FS = 8, 32, 48
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
STATES = {
    **{"linear_num_key_heads": HK, "linear_num_value_heads": HV, "linear_key_head_dim": S},
    **{"linear_value_head_dim": S, "linear_conv_kernel_dim": TAPS, "head_dim": E},
    **{"num_hidden_layers": 4, "rms_norm_eps": 1e-6, "attn_output_gate": True},
}
ROPE = {
    **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
}
HYBRID_KINDS = {
    "qwen35": Kind(
        *("qwen35", "Qwen3_5ForCausalLM", "qwen3_5_text"),
        {**STATES, "rope_parameters": ROPE, "layer_types": LAYERS, "full_attention_interval": 4},
        pre="qwen35",
    ),
    # What images are read with stands beside it, and the block that predicts further tokens.
    "qwen35-images": Kind(
        *("qwen35", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
        {**STATES, "rope_parameters": ROPE, "linear_num_value_heads": HK},
        pre="qwen35",
        tied=True,
        inside={
            "model_type": "qwen3_5",
            "vision_config": {
                **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
                "out_hidden_size": 64,
            },
        },
    ),
}
EXPERTS = {
    **{"num_experts": X, "num_experts_per_tok": 2, "moe_intermediate_size": FX},
    **{"shared_expert_intermediate_size": FS},
}
HYBRID_KINDS["qwen35moe"] = Kind(
    *("qwen35moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    {
        **{**STATES, **EXPERTS, "rope_parameters": ROPE, "layer_types": LAYERS},
        "intermediate_size": None,
    },
    pre="qwen35",
)
HYBRID_KINDS["qwen3next"] = Kind(
    *("qwen3next", "Qwen3NextForCausalLM", "qwen3_next"),
    {
        **{**STATES, **EXPERTS, "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"layer_types": LAYERS, "full_attention_interval": 4},
    },
    pre="qwen2",
)
NORMS = {f"{x}_layernorm.weight": (D,) for x in ("input", "post_attention")}
RANGES = {"A_log": (0.0, 1.0), "dt_bias": (0.0, 0.5), "linear_attn.norm": (1.0, 0.2)}


def write_hybrid(
    folder: Path, name: str, weights: Mapping[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """Write the checkpoint `name`; `changes` replace settings, or remove them (None)."""
    kind = HYBRID_KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**config_of(kind), **changes}.items() if v is not None}
    if kind.inside is not None:
        text = {k: v for k, v in config.items() if k not in ("architectures", TIE)}
        config = {"architectures": [kind.classes], TIE: kind.tied, **kind.inside}
        config["text_config"] = text
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, hybrid_weights_of(name) if weights is None else weights, kind.dtype)
    write_tokenizer(folder, kind.tokenizer, kind.pre)
    return folder


def hybrid_weights_of(name: str) -> dict[str, np.ndarray]:
    """{name in transformers: weights}, in float32 with values that are exact in bfloat16."""
    rng = np.random.default_rng(crc32(name.encode()))
    found = {}
    for key, shape in shapes_of(name).items():
        usual = (0.0, 0.2) if "norm" in key else (0.0, 1.5 * shape[-1] ** -0.5)
        mean, scale = next((x for part, x in RANGES.items() if part in key), usual)
        values = (mean + scale * rng.standard_normal(shape)).astype(np.float32)
        found[key] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return found


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """{name in transformers: shape}."""
    kind = HYBRID_KINDS[name]
    config = config_of(kind)
    types = config.get("layer_types") or ["linear_attention"] * 3 + ["full_attention"]
    model = "model." if kind.inside is None else "model.language_model."
    found: dict[str, tuple[int, ...]] = {
        f"{model}embed_tokens.weight": (N_VOCAB, D),
        f"{model}norm.weight": (D,),
    }
    for i, type in enumerate(types):
        delta = _delta_next if name == "qwen3next" else _delta
        mixer = delta(config["linear_num_value_heads"]) if "linear" in type else _attention()
        layer = {**mixer, **NORMS, **(_experts() if "num_experts" in config else _feed_forward())}
        found |= {f"{model}layers.{i}.{key}": shape for key, shape in layer.items()}
    return found if kind.tied else {**found, "lm_head.weight": (N_VOCAB, D)}


def _delta(n_v_head: int) -> dict[str, tuple[int, ...]]:
    at, channels, values = "linear_attn.", (2 * HK + n_v_head) * S, n_v_head * S
    return {
        **{f"{at}in_proj_qkv.weight": (channels, D), f"{at}in_proj_z.weight": (values, D)},
        **{f"{at}in_proj_b.weight": (n_v_head, D), f"{at}in_proj_a.weight": (n_v_head, D)},
        **{f"{at}conv1d.weight": (channels, 1, TAPS), f"{at}A_log": (n_v_head,)},
        **{f"{at}dt_bias": (n_v_head,), f"{at}norm.weight": (S,)},
        f"{at}out_proj.weight": (D, values),
    }


def _delta_next(n_v_head: int) -> dict[str, tuple[int, ...]]:
    """The same with z beside q, k and v, and alpha beside beta."""
    found, at = _delta(n_v_head), "linear_attn.in_proj_"
    (qkv, _), (z, _) = (found.pop(f"{at}{x}.weight") for x in ("qkv", "z"))
    del found[f"{at}b.weight"], found[f"{at}a.weight"]
    return {**found, f"{at}qkvz.weight": (qkv + z, D), f"{at}ba.weight": (2 * n_v_head, D)}


def _attention() -> dict[str, tuple[int, ...]]:
    at = "self_attn."
    return {
        **{f"{at}q_proj.weight": (2 * H * E, D), f"{at}k_proj.weight": (G * E, D)},
        **{f"{at}v_proj.weight": (G * E, D), f"{at}o_proj.weight": (D, H * E)},
        **{f"{at}q_norm.weight": (E,), f"{at}k_norm.weight": (E,)},
    }


def _feed_forward() -> dict[str, tuple[int, ...]]:
    up = {f"mlp.{x}_proj.weight": (F, D) for x in ("gate", "up")}
    return {**up, "mlp.down_proj.weight": (D, F)}


def _experts() -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (FX, D), "up_proj": (FX, D), "down_proj": (D, FX)}
    found = {f"mlp.experts.{e}.{x}.weight": s for e in range(X) for x, s in shapes.items()}
    at = "mlp.shared_expert"
    return {
        **{"mlp.gate.weight": (X, D), **found, f"{at}_gate.weight": (1, D)},
        **{f"{at}.gate_proj.weight": (FS, D), f"{at}.up_proj.weight": (FS, D)},
        f"{at}.down_proj.weight": (D, FS),
    }
