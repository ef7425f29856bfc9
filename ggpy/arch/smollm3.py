"""smollm3: llama without rope in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .layers.dense import DenseSettings

PERIOD = 4  # the last of so many layers has no rope; a file cannot say another number
THETA = 2e6


def read(c: Context) -> ModelSettings:
    """Layers 3, 7, 11, ... tell positions apart by the causal mask alone."""
    with_rope = llama.attention(c)
    without, ffn = replace(with_rope, rope=None), DenseSettings("silu")
    mixers = [with_rope] * (PERIOD - 1) + [without]
    return ModelSettings([LayerSettings(mixers[i % PERIOD], ffn) for i in range(c.sizes.n_layer)])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """no_rope_layers has a 0 for each layer without rope."""
    n_layer = s.integer("num_hidden_layers")
    period = s.integer("no_rope_layer_interval", PERIOD)
    usual = [int((i + 1) % PERIOD != 0) for i in range(n_layer)]
    with_rope = s.raw("no_rope_layers") or [int((i + 1) % period != 0) for i in range(n_layer)]
    if not isinstance(with_rope, list) or with_rope[:n_layer] != usual:
        key = "no_rope_layers" if s.has("no_rope_layers") else "no_rope_layer_interval"
        raise s.refuse(key, f"only every {PERIOD}th layer can be without rope")
    window = hf.window_of(s)
    if s.flag("use_sliding_window", False) and window and any(hf.sliding_layers(s) or [True]):
        raise s.refuse("use_sliding_window", "a file cannot say which layers have a window")
    for key in ("layer_types", "max_window_layers"):
        s.raw(key)
    return llama.usual_settings(s, THETA)


ARCHITECTURE = Architecture(
    "smollm3",
    read,
    hugging_face=hf.HuggingFace(
        classes={
            "SmolLM3ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 32768}
        },
        settings=settings,
        permuted=hf.PERMUTED,
        tied=True,
    ),
)
