"""qwen3: qwen2 with a norm on each head of q and k instead of the biases."""

from __future__ import annotations

from .decoder import LAYER, QK_NORM, Architecture
from .qwen2 import plan

ARCHITECTURE = Architecture("qwen3", plan, layer={**LAYER, **QK_NORM})
