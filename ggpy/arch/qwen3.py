"""qwen3: qwen2 with a norm on each head of q and k instead of the biases."""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import CLASSIFIER, LAYER, OUTPUT, Architecture
from .layers.attention import QK_NORM
from .qwen2 import read, settings

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}

ARCHITECTURE = Architecture(
    "qwen3",
    read,
    layer={**LAYER, **QK_NORM},
    optional={**OUTPUT, **CLASSIFIER},
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(("Qwen3ForCausalLM", "Qwen3Model"), DEFAULTS),
        settings=settings,
        layer={**hf.LAYER, **hf.QK_NORM},
    ),
)
