"""exaone4: norms after attention and feed-forward instead of before them; norms on each head of q
and k.

The larger models have a window in three of four layers, and no rope in the others.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import (
    LAYER,
    OUTPUT,
    POST_NORM,
    ROPE_FREQS,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers.attention import QK_NORM
from .layers.dense import DenseSettings
from .olmo2 import BEHIND, NORMS

PERIOD = 4  # every fourth layer sees everything
N_LAYER_32B, WINDOW_32B = 64, 4096


def read(c: Context) -> ModelSettings:
    """Without a window in the file, all layers have rope; the 32B models always have a window."""
    usual = WINDOW_32B if c.sizes.n_layer == N_LAYER_32B else 0
    window = c.config.integer("attention.sliding_window", usual, low=0, high=MAX_CONTEXT)
    pattern, ffn = c.config.windowed_layers(c.sizes.n_layer, PERIOD), DenseSettings("silu")
    whole = llama.attention(c, "neox")
    windowed = replace(whole, window=window)
    if window:
        whole = replace(whole, rope=None)
    return ModelSettings([LayerSettings(windowed if x else whole, ffn) for x in pattern])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file, without blocks for multi-token prediction."""
    s.only("num_nextn_predict_layers", 0)
    return usual_settings(s)


def usual_settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """sliding_window_pattern is a period, or a text such as LLLG."""
    s.only("hidden_act", "silu", "swish")
    found = {**hf.sizes(s), **hf.rope(s)}
    found["vocab_size"] = ("u32", s.integer("vocab_size", high=1 << 31))
    if s.has("head_dim"):
        found |= hf.head_sizes(s)
    if window := hf.window_of(s):
        found["attention.sliding_window"] = ("u32", window)
        found["attention.sliding_window_pattern"] = ("arr[bool]", _pattern(s))
    s.raw("sliding_window_pattern")
    s.raw("layer_types")
    return found


def _pattern(s: hf.CheckpointSettings) -> list[bool]:
    text = s.raw("sliding_window_pattern")
    if isinstance(text, str) and set(text) == {"L", "G"}:
        usual = [text[i % len(text)] == "L" for i in range(s.integer("num_hidden_layers"))]
        return hf.sliding_layers(s) or usual
    return hf.windows_in_layers(s, PERIOD)


ARCHITECTURE = Architecture(
    "exaone4",
    read,
    layer={k: v for k, v in {**LAYER, **POST_NORM, **QK_NORM}.items() if k not in NORMS},
    optional={**OUTPUT, **ROPE_FREQS},
    hugging_face=hf.HuggingFace(
        classes={
            "Exaone4ForCausalLM": {
                **{"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
                **{"max_position_embeddings": 2048, "vocab_size": 102400},
            }
        },
        settings=settings,
        layer={k: v for k, v in {**hf.LAYER, **BEHIND, **hf.QK_NORM}.items() if k not in NORMS},
        tensors=hf.rope_freqs,
    ),
)
