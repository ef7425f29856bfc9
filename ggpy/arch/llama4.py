"""llama4: Llama 4 Scout and Maverick, texts only: experts in every layer or in every second layer,
and a shared expert. The router's weight multiplies the input of an expert.

In three of four layers a token sees its own chunk of 8192 positions. In the fourth layer it sees
everything; that layer has no rope, and its queries grow with the position. Files contain none of
these numbers.
"""

from __future__ import annotations

from dataclasses import replace

from ..backends.interface import AttentionTemperature
from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, ROPE_FREQS, Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, dense, moe
from .layers.moe import MoESettings, read_router

PERIOD = 4  # the last of so many layers has no rope
CHUNK = 8192  # positions
TEMPERATURE = AttentionTemperature(0.1, CHUNK, offset=1)
WITHOUT_NORM = 128  # experts of the model whose heads have no norms
SHARED = {name: axes.replace("Fs", "Fx") for name, axes in moe.SHARED.items()}
NAMES = {"mlp.shared_experts.": "mlp.shared_expert.", "mlp.gate.": "mlp.router."}


def read(c: Context) -> ModelSettings:
    """In a context of one chunk, no layer has chunks, and only the last position a temperature."""
    c.config.only("attention.sliding_window", CHUNK)
    whole, n_layer = llama.attention(c), c.sizes.n_layer
    n_expert = max(layer.n_expert for layer in c.sizes.layers)
    norms = n_expert != WITHOUT_NORM
    local = replace(whole, unit_norm=norms, norm_after_rope=norms)
    if c.n_ctx > CHUNK:
        local = replace(local, window=CHUNK, chunked=True)
    whole = replace(whole, rope=None, temperature=TEMPERATURE if c.n_ctx >= CHUNK else None)
    router = read_router(c.config, c.sizes, "sigmoid")
    experts = MoESettings(replace(router, score="sigmoid_chosen", weighs_input=True))
    mixers = [whole if (i + 1) % PERIOD == 0 else local for i in range(n_layer)]
    ffns = moe.feed_forwards(c.sizes, experts)
    return ModelSettings([LayerSettings(*x) for x in zip(mixers, ffns, strict=True)])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file; UnsupportedModel for what it cannot express."""
    n_layer, step = s.integer("num_hidden_layers"), s.integer("interleave_moe_layer_step", 1)
    for key, value in (
        *(("attention_chunk_size", CHUNK), ("floor_scale", TEMPERATURE.length)),
        *(("attn_scale", TEMPERATURE.scale), ("no_rope_layer_interval", PERIOD)),
        ("for_llm_compressor", False),
    ):
        s.only(key, value)
    s.only("attn_temperature_tuning", True, PERIOD)
    with_rope = [(i + 1) % PERIOD != 0 for i in range(n_layer)]
    kinds = ["chunked_attention" if x else "full_attention" for x in with_rope]
    _only_list(s, "no_rope_layers", list(map(int, with_rope)))
    _only_list(s, "layer_types", kinds)
    _only_list(s, "moe_layers", list(range(step - 1, n_layer, step)))
    found = {**llama.usual_settings(s, 5e5), **hf.experts(s)}
    s.only("use_qk_norm", found["expert_count"][1] != WITHOUT_NORM)
    return {
        **found,
        "feed_forward_length": ("u32", s.integer("intermediate_size_mlp")),
        "expert_feed_forward_length": ("u32", s.integer("intermediate_size")),
        moe.PERIOD: ("u32", step),
    }


def _only_list(s: hf.CheckpointSettings, key: str, usual: list[int] | list[str]) -> None:
    value = s.raw(key)
    if value and value != usual:
        raise s.refuse(key, f"only {usual} is, which a file implies")


def _named(theirs: str) -> str:
    """The name that a feed-forward's tensor has in these checkpoints."""
    for usual, here in NAMES.items():
        theirs = theirs.replace(usual, here)
    return theirs.replace("mlp.", "feed_forward.")


DEFAULTS = {
    **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "vocab_size": 202048},
    **{"max_position_embeddings": 131072, "num_local_experts": 16, "num_experts_per_tok": 1},
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "use_qk_norm": True},
}
ARCHITECTURE = Architecture(
    "llama4",
    read,
    layer={**attention.TENSORS, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **moe.TENSORS, **SHARED},
    optional={**OUTPUT, **ROPE_FREQS},
    understands=moe.UNDERSTOOD | {moe.PERIOD},
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), DEFAULTS),
        settings=settings,
        layer={k: _named(v) for k, v in {**hf.LAYER, **hf.EXPERTS, **hf.SHARED}.items()},
        tensors=hf.rope_freqs,
        inserted="language_model.",
        others=("vision_model.", "multi_modal_projector."),
        transposed=True,
    ),
)
