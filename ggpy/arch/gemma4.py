"""gemma4: layers with a window and layers without one, whose heads differ in size; norms on q, k
and v; a scale of each layer's output.

In the smallest models (E2B, E4B), each layer has an input of its own from a table, and the last
layers read the keys and values of earlier layers. In the larger models, layers without a window
make keys and values from one matrix. 26B-A4B has experts beside the feed-forward of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..gguf import GGUFError
from . import hugging_face as hf
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
from .config import MAX_CONTEXT, Dimensions, UnsupportedModel
from .kinds import INPUT, SHARED_LAYERS
from .kinds import UNDERSTOOD as KINDS
from .layers import inputs, moe
from .layers.attention import QK_NORM, AttentionSettings
from .layers.dense import DenseSettings
from .layers.inputs import InputSettings
from .layers.moe import MoESettings, read_router
from .rope import Rope, build_rope, choose_factors, read_rope

LOCAL_BASE, WHOLE_HEAD, PERIOD = 10000.0, 512, 6
NEVER = 1e30  # a factor of pairs that are not rotated
PATTERN = "attention.sliding_window_pattern"
KEYS = {name: {**LAYER, **QK_NORM}[name] for name in ("attn_k.weight", "attn_k_norm.weight")}
VALUES = {"attn_v.weight": LAYER["attn_v.weight"]}
OWN = {**KEYS, **VALUES}  # of layers with keys and values of their own

# Of checkpoints
ROPE = {
    "full_attention": {
        **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_BASE},
}
DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"sliding_window": 512, "max_position_embeddings": 131072, "vocab_size": 262144},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
}
UNIFIED = {  # 12B
    **{key: x for key, x in DEFAULTS.items() if "per_layer" not in key},
    **{"sliding_window": 1024, "max_position_embeddings": 262144},
}
TABLE = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
INPUT_NAMES = {
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
EXPERT_NAMES = {
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj.weight",
    "ffn_gate_exps.weight": "experts.gate_proj.weight",
    "ffn_up_exps.weight": "experts.up_proj.weight",
    "ffn_down_exps.weight": "experts.down_proj.weight",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}
EXPERT_SETTINGS = ("num_experts", "top_k_experts", "moe_intermediate_size")
OTHERS = (  # beside the text model
    *("vision_tower", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio"),
    "vision_embedder",
)


def read(c: Context) -> ModelSettings:
    """Scores are not scaled; only layers without a window have factors of rope."""
    window = c.config.integer("attention.sliding_window", high=MAX_CONTEXT)
    whole, local = _ropes(c)
    ffn: DenseSettings | MoESettings = DenseSettings("gelu_tanh")
    if any(size.n_expert for size in c.sizes.layers):
        router = read_router(c.config, c.sizes, normalise=True)
        ffn = MoESettings(router, "gelu_tanh", DenseSettings("gelu_tanh"), c.sizes.n_embd**-0.5)
    layers = []
    for i, size in enumerate(c.sizes.layers):
        rope, seen = (local, window) if size.windowed else (whole, 0)
        owner = _owner(c, i) if size.shares_keys else None
        mixer = AttentionSettings(1.0, rope, seen, v_norm_eps=c.sizes.eps, keys_of=owner)
        own = InputSettings("gelu_tanh") if c.sizes.n_input else None
        layers.append(LayerSettings(mixer, ffn, False, own, _scale(c, i)))
    return ModelSettings(
        layers,
        embedding_scale=c.sizes.n_embd**0.5,
        soft_cap=c.config.real("final_logit_softcapping", 0.0),
    )


def _ropes(c: Context) -> tuple[Rope, Rope]:
    """(the rope of layers without a window, the rope of layers with one)."""
    whole = read_rope(c.config, c.sizes, "neox")
    base = c.config.real("rope.freq_base_swa", LOCAL_BASE, low=1.000001)
    size = min((x.key_size for x in c.sizes.layers if x.windowed), default=2)
    n_rot = c.config.integer("rope.dimension_count_swa", size, low=2, high=size)
    if n_rot % 2:
        raise GGUFError(f"{c.config.path}: gemma4.rope.dimension_count_swa = {n_rot} is odd")
    factors = choose_factors(whole, c.tensors, c.n_ctx)
    return build_rope(whole, factors), build_rope(replace(whole.with_base(base), n_rot=n_rot))


def _owner(c: Context, layer: int) -> int:
    """The last layer of the same kind that has keys and values of its own."""
    kind = c.sizes.layers[layer].windowed
    own = [i for i, x in enumerate(c.sizes.layers) if x.windowed is kind and not x.shares_keys]
    if not own:
        what = "a window" if kind else "no window"
        raise UnsupportedModel(
            f"{c.config.path}: layer {layer} shares keys and values, but no layer with {what} has "
            f"any: gemma4.{SHARED_LAYERS} is too large"
        )
    return own[-1]


def _scale(c: Context, layer: int) -> float:
    """The scale of x after a layer; 1 if the file does not say."""
    name = f"blk.{layer}.layer_output_scale.weight"
    if name not in c.tensors:
        return 1.0
    scale = float(c.tensors[name].dequantize()[0])
    if not np.isfinite(scale):
        raise GGUFError(f"{c.config.path}: tensor {name!r} is {scale}, not a finite number")
    return scale


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file; UnsupportedModel for what it cannot express, as another rope."""
    s.only("hidden_activation", "gelu_pytorch_tanh")
    s.only("use_bidirectional_attention", "vision")  # only tokens of images see later ones
    n_vocab = s.integer("vocab_size", high=1 << 31)
    if s.integer("vocab_size_per_layer_input", n_vocab, high=1 << 31) != n_vocab:
        raise s.refuse("vocab_size_per_layer_input", f"only {n_vocab}, as vocab_size, is")
    found = {**hf.sizes(s), **_heads(s), **_rope(s), **_shared(s), **_experts(s)}
    found[INPUT] = ("u32", s.integer("hidden_size_per_layer_input", 0, low=0))
    found["attention.sliding_window"] = ("u32", s.integer("sliding_window", high=MAX_CONTEXT))
    found[PATTERN] = ("arr[bool]", _windowed(s))
    if cap := s.real("final_logit_softcapping", 0.0):
        found["final_logit_softcapping"] = ("f32", cap)
    return found


def _windowed(s: hf.CheckpointSettings) -> list[bool]:
    """Which layers have a window; the last layer never has one."""
    return [*hf.windows_in_layers(s, PERIOD)[:-1], False]


def _whole(s: hf.CheckpointSettings, key: str, old: str) -> int | None:
    """A size of layers without a window: from per_layer_config, or under the name `old`."""
    layers = s.part("per_layer_config")
    whole = [i for i, windowed in enumerate(_windowed(s)) if not windowed]
    said = {layers.part(str(i)).integer(key) for i in whole if layers.part(str(i)).has(key)}
    if len(said) > 1:
        raise s.refuse("per_layer_config", f"one {key} of all layers without a window is")
    return said.pop() if said else s.integer(old) if s.has(old) else None


def _heads(s: hf.CheckpointSettings) -> hf.Metadata:
    """Head sizes and numbers of KV heads; these differ between layers only if K = V."""
    local, n_local = s.integer("head_dim"), s.integer("num_key_value_heads")
    whole = _whole(s, "head_dim", "global_head_dim") or WHOLE_HEAD
    n_whole = _whole(s, "num_key_value_heads", "num_global_key_value_heads")
    found: hf.Metadata = {}
    for name, size in (("", whole), ("_swa", local)):
        found |= {f"attention.{x}_length{name}": ("u32", size) for x in ("key", "value")}
    if n_whole is not None and s.flag("attention_k_eq_v", False):
        counts = [n_local if x else n_whole for x in _windowed(s)]
        found["attention.head_count_kv"] = ("arr[i32]", counts)
    s.raw("attention_k_eq_v")
    return found


def _rope(s: hf.CheckpointSettings) -> hf.Metadata:
    """Both kinds of layers have their own base; layers without a window rotate some pairs only."""
    whole, local = _rope_parts(s)
    whole.only("rope_type", "proportional")
    local.only("rope_type", "default")
    found: hf.Metadata = {
        "rope.freq_base": ("f32", whole.real("rope_theta", low=1.000001)),
        "rope.freq_base_swa": ("f32", local.real("rope_theta", low=1.000001)),
        "rope.dimension_count": ("u32", _whole(s, "head_dim", "global_head_dim") or WHOLE_HEAD),
        "rope.dimension_count_swa": ("u32", s.integer("head_dim")),
    }
    whole.real(hf.ROTATED_SHARE, 1.0, high=1.0)
    local.only(hf.ROTATED_SHARE, 1)
    whole.only("factor", 1)
    for part in (whole, local):
        part.refuse_unread()
    return found


def _rope_parts(s: hf.CheckpointSettings) -> list[hf.CheckpointSettings]:
    """[rope settings of layers without a window, those of layers with one]."""
    parts = s.part("rope_parameters", ROPE)
    return [parts.part(kind, ROPE[kind]) for kind in ("full_attention", "sliding_attention")]


def rope_freqs(s: hf.CheckpointSettings) -> dict[str, NDArray[np.float32]]:
    """Factors of rope: 1 for pairs that are rotated, and for the others a number so large that
    their rotation is negligible.
    """
    n_pair = (_whole(s, "head_dim", "global_head_dim") or WHOLE_HEAD) // 2
    share = _rope_parts(s)[0].real(hf.ROTATED_SHARE, 1.0, high=1.0)
    factors = np.full(n_pair, NEVER, np.float32)
    factors[: int(share * 2 * n_pair / 2)] = 1
    return {"rope_freqs.weight": factors}


def _shared(s: hf.CheckpointSettings) -> hf.Metadata:
    """How many layers share keys and values; the feed-forward of these may be twice as wide."""
    n_layer, n_ff = s.integer("num_hidden_layers"), s.integer("intermediate_size")
    n_shared = s.integer("num_kv_shared_layers", 0, low=0, high=n_layer - 1)
    found: hf.Metadata = {SHARED_LAYERS: ("u32", n_shared)}
    if s.flag("use_double_wide_mlp", False):
        widths = [n_ff * (1 + (i >= n_layer - n_shared)) for i in range(n_layer)]
        found["feed_forward_length"] = ("arr[i32]", widths)
    return found


def _experts(s: hf.CheckpointSettings) -> hf.Metadata:
    """Settings of experts. Without enable_moe_block the other settings have no effect."""
    if s.flag("enable_moe_block", False):
        return hf.experts(s)
    for key in EXPERT_SETTINGS:
        s.raw(key)
    return {}


def more(sizes: Dimensions, layer: int | None) -> Mapping[str, str]:
    """The table of inputs, factors of rope, and keys and values of layers that have their own."""
    if layer is None:
        has_whole = not all(x.windowed for x in sizes.layers)
        return {**(inputs.TABLE if sizes.n_input else {}), **(ROPE_FREQS if has_whole else {})}
    found = dict(inputs.TENSORS) if sizes.n_input else {}
    size = sizes.layers[layer]
    if not size.shares_keys:
        found |= OWN if size.windowed else KEYS
    return found


def idle(sizes: Dimensions, layer: int | None) -> Mapping[str, str]:
    """Unused keys and values, which checkpoints have also for layers that share those of others."""
    return OWN if layer is not None and sizes.layers[layer].shares_keys else {}


DENSE = {k: v for k, v in {**LAYER, **POST_NORM, **QK_NORM}.items() if k not in OWN}
ARCHITECTURE = Architecture(
    "gemma4",
    read,
    layer=DENSE,
    expert_layer={**DENSE, **moe.TENSORS, **moe.BESIDE},
    fused=moe.NAMES_BESIDE,
    optional=OUTPUT,
    optional_layer={**VALUES, **inputs.SCALE},
    more=more,
    idle=idle,
    understands=KINDS | moe.UNDERSTOOD | {"attention.head_count_kv", "feed_forward_length"},
    hugging_face=hf.HuggingFace(
        classes={
            "Gemma4ForCausalLM": DEFAULTS,
            "Gemma4ForConditionalGeneration": DEFAULTS,
            "Gemma4UnifiedForConditionalGeneration": UNIFIED,
        },
        settings=settings,
        outside={**hf.GLOBAL, **TABLE},
        layer={**hf.LAYER, **hf.SANDWICH, **hf.QK_NORM, **INPUT_NAMES, **EXPERT_NAMES},
        tensors=rope_freqs,
        tied=True,
        inserted="language_model.",
        others=tuple(f"{a}{b}." for a in ("", "model.") for b in OTHERS),
        characters=True,
        together=True,
    ),
)
