"""gemma-embedding: gemma3 in which a token sees later ones too; its windows reach to both sides.

It makes embeddings: the mean of the hidden states, multiplied with two matrices. Nothing continues
a text.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import (
    DENSE,
    LAYER,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .gemma3 import read as read_gemma3
from .layers.attention import QK_NORM, AttentionSettings


def read(c: Context) -> ModelSettings:
    """gemma3's, on both sides; files need not say so."""
    c.config.only("attention.causal", False)
    found = read_gemma3(c)
    return replace(found, layers=[_both_sided(layer) for layer in found.layers])


def _both_sided(layer: LayerSettings) -> LayerSettings:
    assert isinstance(layer.mixer, AttentionSettings)
    return replace(layer, mixer=replace(layer.mixer, causal=False))


ARCHITECTURE = Architecture(
    "gemma-embedding",
    read,
    layer={**LAYER, **POST_NORM, **QK_NORM},
    optional=DENSE,
    understands=frozenset({"attention.causal"}),
)
