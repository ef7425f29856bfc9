"""cohere2: Command R7B and A: command-r with a window in three of four layers, and no rope in the
others.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .command_r import CHECKPOINT, DEFAULTS, FFN, LAYER, LOGIT_SCALE, UNDERSTOOD, usual_settings
from .config import MAX_CONTEXT

PERIOD = 4  # every fourth layer sees everything
UNUSED = (  # what every one of them has
    *("order_of_interleaved_layers", "position_embedding_type", "use_embedding_sharing"),
    *("use_gated_activation", "use_parallel_block", "use_parallel_embedding", "layer_switch"),
)


def read(c: Context) -> ModelSettings:
    """The window is required."""
    mixer = llama.attention(c)
    window = c.config.integer("attention.sliding_window", high=MAX_CONTEXT)
    windowed, whole = replace(mixer, window=window), replace(mixer, rope=None)
    pattern = c.config.windowed_layers(c.sizes.n_layer, PERIOD)
    layers = [LayerSettings(windowed if x else whole, FFN, parallel=True) for x in pattern]
    return ModelSettings(layers, logit_scale=c.config.real(LOGIT_SCALE, 0.0) or 1.0)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file, which cannot say which layers have a window: all but each fourth."""
    n_layer = s.integer("num_hidden_layers")
    if hf.windows_in_layers(s, PERIOD) != [(i + 1) % PERIOD != 0 for i in range(n_layer)]:
        key = "layer_types" if s.has("layer_types") else "sliding_window_pattern"
        raise s.refuse(key, f"only every {PERIOD}th layer can be without a window")
    found = usual_settings(s, 10000.0)
    share = s.real("rotary_pct", 1.0, high=1.0)
    for key in UNUSED:
        s.raw(key)
    return {
        **found,
        **hf.head_sizes(s),
        "attention.sliding_window": ("u32", s.integer("sliding_window", high=MAX_CONTEXT)),
        "rope.dimension_count": ("u32", int(share * hf.head_size(s))),
        "vocab_size": ("u32", s.integer("vocab_size", high=1 << 31)),
    }


ARCHITECTURE = Architecture(
    "cohere2",
    read,
    layer=LAYER,
    optional={},
    understands=UNDERSTOOD,
    layer_norm=True,
    hugging_face=hf.HuggingFace(
        classes={"Cohere2ForCausalLM": {**DEFAULTS, "sliding_window": 4096}},
        settings=settings,
        layer=CHECKPOINT,
        tied=True,
    ),
)
