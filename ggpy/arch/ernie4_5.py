"""ernie4_5: the dense ERNIE 4.5: llama with a head size of its own.

Rope's pairs are neighbours in its checkpoints, too, so converters do not permute rows.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import OUTPUT, Architecture
from .llama import BIASES, read

THETA = 5e5


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """use_bias adds biases to all matrices, which a file cannot have."""
    s.only("hidden_act", "silu", "swish")
    s.only("use_bias", False)
    s.only("compression_ratio", 1)
    return {**hf.sizes(s), **hf.rope(s, THETA), **hf.head_sizes(s)}


DEFAULTS = {
    **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 131072, "vocab_size": 103424},
}
ARCHITECTURE = Architecture(
    "ernie4_5",
    read,
    optional=OUTPUT,
    optional_layer=BIASES,
    hugging_face=hf.HuggingFace(
        classes={"Ernie4_5ForCausalLM": DEFAULTS, "Ernie4_5_ForCausalLM": DEFAULTS},
        settings=settings,
        tied=True,
    ),
)
