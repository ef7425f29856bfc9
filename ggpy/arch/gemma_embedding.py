"""gemma-embedding: gemma3 in which a token also sees later tokens; its windows reach to both sides.

It makes embeddings: the mean of the hidden states, multiplied with two matrices. It does not
generate text.
"""

from __future__ import annotations

from dataclasses import replace

from . import gemma3
from . import hugging_face as hf
from .architecture import (
    DENSE,
    LAYER,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .layers.attention import QK_NORM, AttentionSettings

BOTH_SIDES = "use_bidirectional_attention"


def read(c: Context) -> ModelSettings:
    """gemma3's settings, with attention to both sides, which files need not say."""
    c.config.only("attention.causal", False)
    found = gemma3.read(c)
    return replace(found, layers=[_both_sided(layer) for layer in found.layers])


def _both_sided(layer: LayerSettings) -> LayerSettings:
    assert isinstance(layer.mixer, AttentionSettings)
    return replace(layer, mixer=replace(layer.mixer, causal=False))


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """gemma3's settings; the window counts both sides, half of it before a token."""
    if not s.flag(BOTH_SIDES, False):
        raise s.refuse(BOTH_SIDES, "a model without a head has to see both sides")
    return gemma3.settings(s, both_sides=True)


ARCHITECTURE = Architecture(
    "gemma-embedding",
    read,
    layer={**LAYER, **POST_NORM, **QK_NORM},
    optional=DENSE,
    understands=frozenset({"attention.causal"}),
    hugging_face=hf.HuggingFace(
        classes={"Gemma3TextModel": gemma3.DEFAULTS},
        settings=settings,
        layer={**hf.LAYER, **hf.SANDWICH, **hf.QK_NORM},
        norm_offset=1.0,
        tied=True,
    ),
)
