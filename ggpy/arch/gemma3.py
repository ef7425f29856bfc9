"""gemma3: gemma2 with norms on q and k, no soft caps, and a window in five of six layers.

The windowed layers have their own rope base and are never scaled. Only the text model is here.
"""

from __future__ import annotations

from ..gguf import Tensor
from . import hugging_face as hf
from .architecture import (
    LAYER,
    OUTPUT,
    POST_NORM,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from .config import MAX_CONTEXT, Config
from .gemma2 import attention_scale, check_scale
from .layers.attention import QK_NORM, AttentionSettings
from .layers.dense import DenseSettings
from .rope import build_rope, read_rope

N_LAYER_27B = 62
PERIOD = 6  # every sixth layer sees everything
LOCAL_BASE = 10000.0
EPS = "attention.layer_norm_rms_epsilon"
OTHERS = ("vision_tower", "multi_modal_projector")  # beside the text model
DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"sliding_window": 4096, "max_position_embeddings": 131072, "vocab_size": 262208},
}


def adapt(config: Config, tensors: dict[str, Tensor]) -> None:
    """Adds settings that Ollama leaves out of files of models with images: all these share them."""
    if config.has("mm.tokens_per_image") and not config.has(EPS):
        linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
        config.assume({EPS: 1e-6, "rope.freq_base": 1e6, **linear})


def read(c: Context) -> ModelSettings:
    """If the file has no window, no layer has one, and all layers have the same rope."""
    config, scale = c.config, attention_scale(c, N_LAYER_27B)
    window = config.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
    rope = read_rope(config, c.sizes, "neox")
    ollama = config.real("rope.local.freq_base", LOCAL_BASE, low=1.000001)  # its converter's name
    base = config.real("rope.freq_base_swa", ollama, low=1.000001)
    cap = config.real("attn_logit_softcapping", 0.0)
    whole = AttentionSettings(scale, build_rope(rope), 0, cap)
    windowed = AttentionSettings(scale, build_rope(rope.with_base(base)), window, cap)
    local = [window > 0 and x for x in config.windowed_layers(c.sizes.n_layer, PERIOD)]
    ffn = DenseSettings("gelu_tanh")
    return ModelSettings(
        [LayerSettings(windowed if x else whole, ffn) for x in local],
        embedding_scale=c.sizes.n_embd**0.5,
        soft_cap=config.real("final_logit_softcapping", 0.0),
    )


def settings(s: hf.CheckpointSettings, both_sides: bool = False) -> hf.Metadata:
    """The settings of a file. A file has a pattern of windows only if it is not the usual one."""
    check_scale(s, N_LAYER_27B, both_sides)
    s.only("attn_logit_softcapping", 0)
    base = s.real("rope_local_base_freq", LOCAL_BASE, low=1.000001)
    if s.part("rope_parameters").has("sliding_attention"):
        local = hf.rope_part(s, base, "sliding_attention")
        base = local.real("rope_theta", low=1.000001)
        local.only("rope_type", "default")
        local.refuse_unread()
    found = {**hf.sizes(s), **hf.rope(s, 1e6), **hf.head_sizes(s)}
    found["rope.freq_base_swa"] = ("f32", base)
    if cap := s.real("final_logit_softcapping", 0.0):
        found["final_logit_softcapping"] = ("f32", cap)
    return {**found, **_windows(s)}


def _windows(s: hf.CheckpointSettings) -> hf.Metadata:
    period = s.integer("sliding_window_pattern", PERIOD)
    period = s.integer("_sliding_window_pattern", period)
    layers = range(s.integer("num_hidden_layers"))
    sliding = hf.sliding_layers(s) or [i % period < period - 1 for i in layers]
    window = hf.window_of(s)
    if not window or not any(sliding):
        return {}
    found: hf.Metadata = {"attention.sliding_window": ("u32", window)}
    if sliding != [i % PERIOD < PERIOD - 1 for i in layers]:
        found["attention.sliding_window_pattern"] = ("arr[bool]", sliding)
    return found


ARCHITECTURE = Architecture(
    "gemma3",
    read,
    layer={**LAYER, **POST_NORM, **QK_NORM},
    optional=OUTPUT,
    adapt=adapt,
    hugging_face=hf.HuggingFace(
        classes={"Gemma3ForCausalLM": DEFAULTS, "Gemma3ForConditionalGeneration": DEFAULTS},
        settings=settings,
        layer={**hf.LAYER, **hf.SANDWICH, **hf.QK_NORM},
        norm_offset=1.0,
        tied=True,
        inserted="language_model.",
        others=tuple(f"{a}{b}." for a in ("", "model.") for b in OTHERS),
    ),
)
