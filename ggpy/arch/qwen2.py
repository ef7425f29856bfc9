"""qwen2: llama with biases on q, k and v, and rope's halves as pairs."""

from __future__ import annotations

from .decoder import LAYER, QKV_BIAS, Architecture, Context, Plan
from .llama import plan as llama_plan


def plan(c: Context) -> Plan:
    """llama's, with rope style "neox"."""
    return llama_plan(c, "neox")


ARCHITECTURE = Architecture("qwen2", plan, layer={**LAYER, **QKV_BIAS})
