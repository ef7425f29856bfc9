"""gemma2: sandwich norms, scaled embeddings, soft caps, a window in every other layer.

The files store the norms' weights with their 1 already added.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import (
    LAYER,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT
from .layers.attention import AttentionSettings
from .layers.dense import DenseSettings
from .rope import build_local_rope, build_rope, read_rope

N_LAYER_27B = 46
PERIOD = 2  # every second layer sees everything
BASE = 10000.0  # of rope, where a file does not say


def read(c: Context) -> ModelSettings:
    """By default, layers 0, 2, 4, ... have a window, and layers 1, 3, 5, ... see everything."""
    window = c.config.integer("attention.sliding_window", 4096, low=0, high=MAX_CONTEXT)
    rope = read_rope(c.config, c.sizes, "neox")
    scale = attention_scale(c, N_LAYER_27B)
    cap = c.config.real("attn_logit_softcapping", 50.0)
    windowed = AttentionSettings(scale, build_local_rope(c.config, rope), window, cap)
    whole = AttentionSettings(scale, build_rope(rope), 0, cap)
    pattern, ffn = c.config.windowed_layers(c.sizes.n_layer, PERIOD), DenseSettings("gelu_tanh")
    return ModelSettings(
        [LayerSettings(windowed if x else whole, ffn) for x in pattern],
        embedding_scale=c.sizes.n_embd**0.5,
        soft_cap=c.config.real("final_logit_softcapping", 30.0),
    )


def attention_scale(c: Context, n_layer_27b: int) -> float:
    """1 / sqrt(E), or 1 / sqrt(D / H) in the 27B models, which only their depth identifies."""
    s, layer = c.sizes, c.sizes.layer
    usual = (s.n_embd // layer.n_head if s.n_layer == n_layer_27b else layer.key_size) ** -0.5
    return c.config.real("attention.scale", 0.0) or usual


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Both soft caps are required: a file cannot say that there is none."""
    check_scale(s, N_LAYER_27B)
    sliding = hf.sliding_layers(s)
    if sliding and sliding != [i % 2 == 0 for i in range(len(sliding))]:
        raise s.refuse("layer_types", "every other layer from the first on has a window")
    found = {**hf.sizes(s), **hf.rope(s), **hf.head_sizes(s)}
    if found["rope.freq_base"][1] == BASE:
        del found["rope.freq_base"]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found |= {key: ("f32", s.real(key, low=1e-6)) for key in caps}
    found["attention.sliding_window"] = ("u32", hf.window_of(s))
    s.only("sliding_window_size", hf.window_of(s))  # the same number under another name
    return found


def check_scale(s: hf.CheckpointSettings, n_layer_27b: int, both_sides: bool = False) -> None:
    """Refuse what files of Gemma cannot express: another scale, activation, or direction."""
    s.only("hidden_activation", "gelu_pytorch_tanh")
    s.only("hidden_act", "gelu_pytorch_tanh", "gelu")  # transformers reads the other one
    s.only("use_bidirectional_attention", both_sides)
    size = hf.head_size(s)
    if s.integer("num_hidden_layers") == n_layer_27b:
        size = s.integer("hidden_size") // s.integer("num_attention_heads")
    if s.real("query_pre_attn_scalar", 256.0, low=1e-6) != size:
        raise s.refuse("query_pre_attn_scalar", f"only {size}, the size of a head, is")


ARCHITECTURE = Architecture(
    "gemma2",
    read,
    layer={**LAYER, **POST_NORM},
    optional={},
    hugging_face=hf.HuggingFace(
        classes={
            "Gemma2ForCausalLM": {
                **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
                **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                **{"sliding_window": 4096, "max_position_embeddings": 8192},
            }
        },
        settings=settings,
        layer={**hf.LAYER, **hf.SANDWICH},
        norm_offset=1.0,
        tied=True,
    ),
)
