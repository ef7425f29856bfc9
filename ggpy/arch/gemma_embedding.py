"""gemma-embedding: gemma3 in which a token sees later ones too; its windows reach to both sides.

It makes embeddings: the mean of the hidden states, multiplied with two matrices. Nothing continues
a text.
"""

from __future__ import annotations

from dataclasses import replace

from .architecture import DENSE, LAYER, POST_NORM, Architecture, Context, ModelSettings
from .gemma3 import read as read_gemma3
from .layers.attention import QK_NORM


def read(c: Context) -> ModelSettings:
    """gemma3's, on both sides; files need not say so."""
    c.config.only("attention.causal", False)
    found = read_gemma3(c)
    layers = [replace(x, mixer=replace(x.mixer, causal=False)) for x in found.layers]
    return replace(found, layers=layers)


ARCHITECTURE = Architecture(
    "gemma-embedding",
    read,
    layer={**LAYER, **POST_NORM, **QK_NORM},
    optional=DENSE,
    understands=frozenset({"attention.causal"}),
)
