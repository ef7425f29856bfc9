"""llama: Llama 1 to 3, Mistral, TinyLlama, SmolLM2 and whatever else is converted under this name.

Converters permute the rows of q and k so that rope's pairs are neighbours: style "norm".
"""

from __future__ import annotations

from typing import Literal

from .decoder import OUTPUT, QKV_BIAS, ROPE_FACTORS, ROPE_FREQS, Architecture, Context, Plan
from .rope import build_rope, choose_factors, read_rope


def plan(c: Context, style: Literal["norm", "neox"] = "norm") -> Plan:
    """The same rope everywhere; a window, where the file has one, in every layer."""
    n_layer = c.sizes.n_layer
    settings = read_rope(c.config, c.sizes, style)
    rope = build_rope(settings, choose_factors(settings, c.tensors, c.n_ctx))
    return Plan(
        ropes=[rope] * n_layer,
        windows=[c.config.integer("attention.sliding_window", 0, low=0, high=1 << 28)] * n_layer,
        scale=c.config.real("attention.scale", 0.0) or c.sizes.head_size**-0.5,
        activation="silu",
    )


ARCHITECTURE = Architecture(
    "llama",
    plan,
    optional={**OUTPUT, **ROPE_FREQS, **ROPE_FACTORS},
    optional_layer=QKV_BIAS,
)
