"""gemma2: sandwich norms, scaled embeddings, soft caps, a window in every other layer.

The files store the norms' weights with their 1 already added.
"""

from __future__ import annotations

from .decoder import LAYER, POST_NORM, Architecture, Context, Plan
from .rope import build_rope, read_rope

N_LAYER_27B = 46


def plan(c: Context) -> Plan:
    """Layers 0, 2, 4, ... see a window, 1, 3, 5, ... everything."""
    config, n_layer = c.config, c.sizes.n_layer
    window = config.integer("attention.sliding_window", 4096, low=0, high=1 << 28)
    rope = build_rope(read_rope(config, c.sizes, "neox"))
    return Plan(
        ropes=[rope] * n_layer,
        windows=[window if i % 2 == 0 else 0 for i in range(n_layer)],
        scale=attention_scale(c, N_LAYER_27B),
        activation="gelu_tanh",
        embedding_scale=c.sizes.n_embd**0.5,
        soft_cap=config.real("attn_logit_softcapping", 50.0),
        final_soft_cap=config.real("final_logit_softcapping", 30.0),
    )


def attention_scale(c: Context, n_layer_27b: int) -> float:
    """1 / sqrt(E), but 1 / sqrt(D / H) in the 27B models, which files tell by their depth alone."""
    s = c.sizes
    usual = (s.n_embd // s.n_head if s.n_layer == n_layer_27b else s.head_size) ** -0.5
    return c.config.real("attention.scale", 0.0) or usual


ARCHITECTURE = Architecture(
    "gemma2", plan, layer={**LAYER, **POST_NORM}, optional={}, activation="gelu_tanh"
)
