"""Small checkpoints of Gemma 4, as checkpoints.py has them of other models: one with inputs of its
layers and shared keys, one whose keys are its values, with as many heads as the layer's kind says,
and one with experts beside each feed-forward, as 26B-A4B has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from checkpoints import N_VOCAB, Kind, config_of, pieces, write_tokenizer, write_weights

D, F, H, G, E, E_WHOLE, I = 64, 96, 4, 2, 16, 32, 16  # noqa: E741
X, FX = 8, 32  # experts, and their width
MARKS = (  # of turns, and of the parts of an answer
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"),
)
KINDS_OF_LAYERS = {True: "sliding_attention", False: "full_attention"}
COMMON = {
    **{"head_dim": E, "global_head_dim": E_WHOLE, "sliding_window": 8, "attention_bias": False},
    **{"hidden_activation": "gelu_pytorch_tanh", "vocab_size_per_layer_input": N_VOCAB},
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
NAMES = "gemma4", "Gemma4ForCausalLM", "gemma4_text"
GEMMA4_KINDS = {
    "gemma4-inputs": Kind(
        *NAMES,
        {
            **COMMON,
            **{"num_hidden_layers": 6, "hidden_size_per_layer_input": I},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "layer_types": [KINDS_OF_LAYERS[i % 2 == 0] for i in range(6)],
        },
        tied=True,
    ),
    "gemma4-kv": Kind(
        *NAMES,
        {
            **COMMON,
            **{"num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
            **{"num_kv_shared_layers": 0, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "final_logit_softcapping": 3.0},
            "layer_types": [KINDS_OF_LAYERS[i % 6 != 5] for i in range(6)],
        },
        dtype="float32",
        tied=True,
    ),
    "gemma4-experts": Kind(
        *NAMES,
        {
            **COMMON,
            **{"num_hidden_layers": 3, "hidden_size_per_layer_input": 0},
            **{"num_kv_shared_layers": 0, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "final_logit_softcapping": 30.0},
            **{"enable_moe_block": True, "num_experts": X, "top_k_experts": 2},
            "moe_intermediate_size": FX,
            "layer_types": [KINDS_OF_LAYERS[i != 2] for i in range(3)],
        },
        tied=True,
    ),
}


def write_gemma4(
    folder: Path, name: str, weights: Mapping[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """Write the checkpoint `name`; `changes` replace settings, or remove them (None)."""
    kind = GEMMA4_KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**config_of(kind), **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, gemma4_weights_of(name) if weights is None else weights, kind.dtype)
    write_tokenizer(folder, "pieces", "")
    (folder / "tokenizer.json").write_text(json.dumps(characters()))
    return folder


def characters() -> dict[str, Any]:
    """A tokenizer.json that merges characters of whole lines, has MARKS, and is as long as the
    embedding table.
    """
    found = json.loads(pieces())
    found["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    found["pre_tokenizer"] = {
        **{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
        "invert": False,
    }
    like = found["added_tokens"][0]
    first = len(found["model"]["vocab"])
    texts = [*MARKS, *(f"<unused{i}>" for i in range(N_VOCAB - first - len(MARKS)))]
    found["added_tokens"] += [
        {**like, "id": first + i, "content": text} for i, text in enumerate(texts)
    ]
    return found


def gemma4_weights_of(name: str) -> dict[str, np.ndarray]:
    """{name in transformers: weights}, in float32 with values that are exact in bfloat16."""
    rng = np.random.default_rng(crc32(name.encode()))
    found = {}
    for key, shape in gemma4_shapes_of(name).items():
        values = rng.standard_normal(shape)
        if "norm" in key:
            values = 1 + 0.2 * values
        elif key.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            values = 0.75 + 0.1 * values
        else:
            values *= 1.5 * shape[-1] ** -0.5
        found[key] = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return found


def gemma4_shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """{name in transformers: shape}."""
    config = config_of(GEMMA4_KINDS[name])
    n_layer, size = config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_VOCAB, D)}
    found["model.norm.weight"] = (D,)
    if size:
        found["model.embed_tokens_per_layer.weight"] = (N_VOCAB, n_layer * size)
        found["model.per_layer_model_projection.weight"] = (n_layer * size, D)
        found["model.per_layer_projection_norm.weight"] = (size,)
    for i in range(n_layer):
        layer = _layer(config, i)
        found |= {f"model.layers.{i}.{key}": shape for key, shape in layer.items()}
    return found


def _layer(config: dict[str, Any], i: int) -> dict[str, tuple[int, ...]]:
    whole = config["layer_types"][i] == "full_attention"
    shares = i >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    e = E_WHOLE if whole else E
    kv = e * (config.get("num_global_key_value_heads", G) if whole else G)
    f = F * (1 + (shares and config.get("use_double_wide_mlp", False)))
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found: dict[str, tuple[int, ...]] = {f"{x}_layernorm.weight": (D,) for x in norms}
    found |= {"self_attn.q_proj.weight": (H * e, D), "self_attn.o_proj.weight": (D, H * e)}
    found |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
    found |= {"self_attn.k_proj.weight": (kv, D), "layer_scalar": (1,)}
    if not (whole and config.get("attention_k_eq_v", False)):
        found["self_attn.v_proj.weight"] = (kv, D)
    found |= {f"mlp.{x}_proj.weight": (f, D) for x in ("gate", "up")}
    found["mlp.down_proj.weight"] = (D, f)
    if config.get("enable_moe_block"):
        found |= _experts()
    if size := config["hidden_size_per_layer_input"]:
        found |= {
            "per_layer_input_gate.weight": (size, D),
            "per_layer_projection.weight": (D, size),
        }
        found["post_per_layer_input_norm.weight"] = (D,)
    return found


def _experts() -> dict[str, tuple[int, ...]]:
    """Gate above up in one tensor, which of transformers has no ending."""
    norms = ("pre_feedforward_layernorm_2", *(f"post_feedforward_layernorm_{i}" for i in (1, 2)))
    found: dict[str, tuple[int, ...]] = {f"{x}.weight": (D,) for x in norms}
    found |= {"experts.gate_up_proj": (X, 2 * FX, D), "experts.down_proj": (X, D, FX)}
    found |= {"router.proj.weight": (X, D), "router.scale": (D,)}
    return {**found, "router.per_expert_scale": (X,)}
