"""Small checkpoints of mixtures of experts, as checkpoints.py has them of dense models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from checkpoints import N_VOCAB, Kind, _random, config_of, write_tokenizer, write_weights

D, F, H, G, X, FX = 64, 96, 4, 2, 8, 32
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
}


def write_moe(folder: Path, name: str, weights: Mapping[str, np.ndarray] | None = None,
              **changes: Any) -> Path:  # fmt: skip
    """Write the checkpoint `name`; `changes` replace settings, or remove them (None)."""
    kind = MOE_KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**config_of(kind), **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
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
    size = config_of(MOE_KINDS[name]).get("head_dim", D // H)
    q, kv = H * size, G * size
    widths = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    layer: dict[str, tuple[int, ...]] = {
        f"{x}_layernorm.weight": (D,) for x in ("input", "post_attention")
    }
    layer |= {f"self_attn.{x}.weight": shape for x, shape in widths.items()}
    biases = {"qwen2moe": ("q_proj", "k_proj", "v_proj"), "gpt-oss": tuple(widths)}.get(name, ())
    layer |= {f"self_attn.{x}.bias": widths[x][:1] for x in biases}
    if name == "qwen3moe":
        layer |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
    layer |= {"mixtral": _mixtral, "gpt-oss": _gpt_oss}.get(name, _qwen)()
    if name == "qwen2moe":
        layer |= {f"mlp.shared_expert.{x}_proj.weight": (48, D) for x in ("gate", "up")}
        layer["mlp.shared_expert.down_proj.weight"] = (D, 48)
        layer["mlp.shared_expert_gate.weight"] = (1, D)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_VOCAB, D)}
    found |= {"model.norm.weight": (D,), "lm_head.weight": (N_VOCAB, D)}
    return found | {f"model.layers.{i}.{x}": shape for i in range(2) for x, shape in layer.items()}


def _qwen() -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (FX, D), "up_proj": (FX, D), "down_proj": (D, FX)}
    experts = {f"mlp.experts.{e}.{x}.weight": s for e in range(X) for x, s in shapes.items()}
    return {"mlp.gate.weight": (X, D), **experts}


def _mixtral() -> dict[str, tuple[int, ...]]:
    shapes, at = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}, "block_sparse_moe."
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
