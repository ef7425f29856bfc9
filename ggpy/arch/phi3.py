"""phi3: Phi-3 to Phi-4: llama with q, k, v in one tensor, gate and up in another, and LongRoPE.

Some rotate only a part of each head (`rope.dimension_count`); rope's style is "neox".
"""

from __future__ import annotations

from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from . import hugging_face as hf
from .architecture import OUTPUT, ROPE_FACTORS, ROPE_FREQS, Architecture
from .config import MAX_CONTEXT
from .qwen2 import read

ROPE_KINDS = ("default", "longrope")
FUSED = {"attn_qkv.weight": "self_attn.qkv_proj.weight", "ffn_up.weight": "mlp.gate_up_proj.weight"}
PARTS = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight")


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """A window of 0 means none; the factors of LongRoPE are tensors."""
    s.only("hidden_act", "silu", "swish")
    s.only("full_attn_mod", 1)  # Phi-4-mini has layers of one kind
    s.only("interpolate_factor", 1)
    part = hf.rope_part(s, 10000.0)
    found: hf.Metadata = {
        **hf.sizes(s),
        "rope.scaling.original_context_length": ("u32", _original_context(s, part)),
        "rope.dimension_count": ("u32", _n_rot(s, part)),
        "rope.freq_base": ("f32", part.real("rope_theta", low=1.000001)),
        "attention.sliding_window": ("u32", hf.window_of(s)),
    }
    if hf.rope_kind(part) not in ROPE_KINDS:
        raise part.refuse("rope_type" if part.has("rope_type") else "type", "only LongRoPE is")
    if _factors(s, part):
        found["rope.scaling.attn_factor"] = ("f32", _magnitude(s, part))
    part.refuse_unread()
    return found


def rope_factors(s: hf.CheckpointSettings) -> dict[str, NDArray[np.float32]]:
    """The two tensors of LongRoPE, factors[R/2] each."""
    return _factors(s, hf.rope_part(s, 10000.0))


def _factors(
    s: hf.CheckpointSettings, part: hf.CheckpointSettings
) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name in ("long", "short"):
        factors = part.numbers(f"{name}_factor")
        if hf.rope_kind(part) != "longrope":
            return {}
        if len(factors) != _n_rot(s, part) // 2:
            raise part.refuse(f"{name}_factor", f"it has to have {_n_rot(s, part) // 2} numbers")
        found[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    return found


def _magnitude(s: hf.CheckpointSettings, part: hf.CheckpointSettings) -> float:
    """Source: transformers' _compute_longrope_parameters."""
    original = _original_context(s, part)
    stretched = s.integer("max_position_embeddings", high=MAX_CONTEXT) / original
    factor = part.real("factor", stretched, low=1e-6)
    usual = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    return part.real("attention_factor", usual, low=1e-6)


def _original_context(s: hf.CheckpointSettings, part: hf.CheckpointSettings) -> int:
    key = "original_max_position_embeddings"
    return part.integer(key, s.integer(key, 4096, low=2, high=MAX_CONTEXT), 2, MAX_CONTEXT)


def _n_rot(s: hf.CheckpointSettings, part: hf.CheckpointSettings) -> int:
    return int(hf.rotated_share(s, part) * s.integer("hidden_size")) // s.integer(
        "num_attention_heads"
    )


ARCHITECTURE = Architecture(
    "phi3",
    read,
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    fused={
        "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "ffn_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
    },
    hugging_face=hf.HuggingFace(
        classes={"Phi3ForCausalLM": {"rms_norm_eps": 1e-5}},
        settings=settings,
        layer={**{k: v for k, v in hf.LAYER.items() if k not in PARTS}, **FUSED},
        tensors=rope_factors,
    ),
)
