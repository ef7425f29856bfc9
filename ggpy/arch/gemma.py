"""gemma: Gemma 1 and CodeGemma: llama with scaled embeddings, GELU, and heads of their own size.

The files store the norms' weights with their 1 already added.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .gemma2 import BASE
from .layers.dense import DenseSettings

GELU = ("gelu_pytorch_tanh", "gelu")  # the old name stands for the approximation, too


def read(c: Context) -> ModelSettings:
    """Every layer sees the whole context."""
    layer = LayerSettings(llama.attention(c, "neox"), DenseSettings("gelu_tanh"))
    return ModelSettings([layer] * c.sizes.n_layer, embedding_scale=c.sizes.n_embd**0.5)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Rope is not scaled."""
    for key in ("hidden_act", "hidden_activation"):
        s.only(key, *GELU)
    s.only("use_bidirectional_attention", False)
    found = {**hf.sizes(s), **hf.rope(s), **hf.head_sizes(s)}
    if found["rope.freq_base"][1] == BASE:
        del found["rope.freq_base"]
    return found


ARCHITECTURE = Architecture(
    "gemma",
    read,
    optional={},
    optional_layer={},
    hugging_face=hf.HuggingFace(
        classes={
            "GemmaForCausalLM": {
                **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
                **{"max_position_embeddings": 8192, "vocab_size": 256000},
            }
        },
        settings=settings,
        norm_offset=1.0,
        tied=True,
    ),
)
