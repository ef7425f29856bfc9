"""mistral3: Ministral 3, Devstral 2 and Mistral Small 3: llama with another magnitude of YaRN, and
with queries that grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

from ..backends.interface import AttentionTemperature
from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, ROPE_FREQS, Architecture, Context, LayerSettings, ModelSettings
from .layers.dense import DenseSettings
from .rope import read_rope, yarn_magnitude

SCALE, LOG = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
BETA, MSCALES = "llama_4_scaling_beta", ("mscale", "mscale_all_dim")
OTHERS = ("vision_tower", "multi_modal_projector")  # beside the text model
DEFAULTS = {
    **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "vocab_size": 131072},
}


def read(c: Context) -> ModelSettings:
    """Queries grow beyond the original context only, so a shorter one has no temperature."""
    mixer = llama.attention(c)
    settings = read_rope(c.config, c.sizes, "norm")
    scale, log_multiplier = c.config.real(SCALE, 0.0), c.config.real(LOG, 0.0)
    if mixer.rope and settings.scaling == "yarn" and log_multiplier:
        magnitude = mixer.rope.magnitude / yarn_magnitude(settings.factor, log_multiplier)
        mixer = replace(mixer, rope=replace(mixer.rope, magnitude=magnitude))
    if scale and c.n_ctx > settings.n_ctx_orig:
        mixer = replace(mixer, temperature=AttentionTemperature(scale, settings.n_ctx_orig))
    return ModelSettings([LayerSettings(mixer, DenseSettings("silu"))] * c.sizes.n_layer)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of Mistral Small 3, whose text model is a plain Mistral, and of Ministral 3."""
    s.only("sliding_window", 0)
    if s.raw("model_type") != "ministral3":
        return llama.usual_settings(s, 1e9)
    part = hf.rope_part(s, 1e6)
    found = llama.usual_settings(s, 1e6, (BETA, *MSCALES, "max_position_embeddings"))
    if beta := part.real(BETA, 0.0):
        found[SCALE] = ("f32", beta)
    mscale, of_all = (part.real(key, 0.0) for key in MSCALES)
    if mscale and of_all:  # transformers heeds them together only
        part.only("mscale", 1)
        found[LOG] = ("f32", of_all)
    return found


ARCHITECTURE = Architecture(
    "mistral3",
    read,
    optional={**OUTPUT, **ROPE_FREQS},
    optional_layer=llama.BIASES,
    hugging_face=hf.HuggingFace(
        classes={"Ministral3ForCausalLM": DEFAULTS, "Mistral3ForConditionalGeneration": DEFAULTS},
        settings=settings,
        tensors=hf.rope_freqs,
        permuted=hf.PERMUTED,
        tied=None,
        inserted="language_model.",
        others=tuple(f"{a}{b}." for a in ("", "model.") for b in OTHERS),
    ),
)
