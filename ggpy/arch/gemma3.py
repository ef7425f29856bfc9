"""gemma3: gemma2 with norms on q and k, no soft caps, and a window in five of six layers.

The windowed layers have their own rope base and are never scaled. Only the text model is here.
"""

from __future__ import annotations

import numpy as np

from ..ops.interface import Rope
from .config import Config, UnsupportedModel
from .decoder import LAYER, OUTPUT, POST_NORM, QK_NORM, Architecture, Context, Plan
from .gemma2 import attention_scale
from .rope import build_rope, read_rope

N_LAYER_27B = 62
PERIOD = 6  # every sixth layer sees everything
LOCAL_BASE = 10000.0


def plan(c: Context) -> Plan:
    """A file without a window has none, and one rope."""
    config = c.config
    window = config.integer("attention.sliding_window", 0, low=0, high=1 << 28)
    local = [window > 0 and x for x in _local_layers(config, c.sizes.n_layer)]
    return Plan(
        ropes=_ropes(c, local),
        windows=[window if x else 0 for x in local],
        scale=attention_scale(c, N_LAYER_27B),
        activation="gelu_tanh",
        embedding_scale=c.sizes.n_embd**0.5,
        soft_cap=config.real("attn_logit_softcapping", 0.0),
        final_soft_cap=config.real("final_logit_softcapping", 0.0),
    )


def _ropes(c: Context, local: list[bool]) -> list[Rope]:
    settings = read_rope(c.config, c.sizes, "neox")
    everywhere = build_rope(settings)
    base = c.config.real("rope.freq_base_swa", LOCAL_BASE, low=1.000001)
    windowed = build_rope(settings.with_base(base))
    return [windowed if x else everywhere for x in local]


def _local_layers(config: Config, n_layer: int) -> list[bool]:
    """Which layers have a window: from a period, or one bool for each layer."""
    key = "attention.sliding_window_pattern"
    pattern = config.raw(key)
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or len(pattern) < n_layer:
            raise UnsupportedModel(
                f"{config.path}: gemma3.{key} must be one bool for each of {n_layer} layers"
            )
        return [bool(x) for x in pattern[:n_layer]]
    period = config.integer(key, PERIOD, low=0)
    return [period == 0 or i % period < period - 1 for i in range(n_layer)]


ARCHITECTURE = Architecture(
    "gemma3", plan, layer={**LAYER, **POST_NORM, **QK_NORM}, optional=OUTPUT, activation="gelu_tanh"
)
