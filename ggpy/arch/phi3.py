"""phi3: Phi-3 to Phi-4: llama with q, k, v in one tensor, gate and up in another, and LongRoPE.

Only a part of each head is rotated in some of them (`rope.dimension_count`), with halves as pairs.
"""

from __future__ import annotations

from .decoder import OUTPUT, ROPE_FACTORS, ROPE_FREQS, Architecture
from .qwen2 import plan

ARCHITECTURE = Architecture(
    "phi3",
    plan,
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    fused={
        "attn_qkv.weight": (
            ("attn_q.weight", "HE"),
            ("attn_k.weight", "GE"),
            ("attn_v.weight", "GE"),
        ),
        "ffn_up.weight": (("ffn_gate.weight", "F"), ("ffn_up.weight", "F")),
    },
)
