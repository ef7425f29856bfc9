"""What an architecture says about its checkpoints on the Hugging Face hub, and the words it says it
in: names of tensors, and a reader of config.json in which every key has to be understood.

Each architecture's own file has one `HuggingFace`. Defaults of settings are those of transformers,
whose files leave out what equals them; keys and values of metadata are those that llama.cpp's
converter writes. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..util.messages import escaped
from .config import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    Config,
    LayerSizes,
    UnsupportedModel,
    short,
)
from .expert_sizes import MAX_EXPERTS

Metadata = dict[str, tuple[str, Any]]  # key below "<architecture>." -> type as in File.types, value

# Settings that change nothing in what a model computes for a given text: how it was trained, how it
# is run elsewhere, what it is called. Special tokens are the tokenizer's business.
HARMLESS = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"),
        *("torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        *("pretraining_tp", "return_dict", "output_attentions", "output_hidden_states"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type"),
        *("max_length", "temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams"),
        *("repetition_penalty", "length_penalty", "num_return_sequences", "diversity_penalty"),
        *("num_beam_groups", "tokenizer_class", "model_max_length", "unsloth_version"),
        *("unsloth_fixed", "is_llama_config", "transformers.js_config", "quantization_config"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),  # training
        *("attention_bias", "mlp_bias"),  # the tensors say it: one that is not known is refused
    }
)

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {  # below "model.layers.0." and so on
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
ATTENTION = {ours: theirs for ours, theirs in LAYER.items() if not theirs.startswith("mlp.")}
# What settings are called; transformers 5 has the first for all models
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED_COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = {  # the names that convert/experts.py gives to tensors of all experts
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
}
PARTS = ("gate", "up", "down")  # of a feed-forward
SHARED = {f"ffn_{x}_shexp.weight": f"mlp.shared_experts.{x}_proj.weight" for x in PARTS}
QKV_BIAS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
QK_NORM = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
SANDWICH = {  # norms before and after both halves of a layer
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
PERMUTED = ("attn_q", "attn_k")  # rows in the order that rope's style "norm" wants


class CheckpointSettings(Config):
    """A config.json, or a part of it; every read is checked, `null` counts as absent.

    `ignored` are keys that are taken for harmless whatever they say.
    """

    def __init__(
        self, values: Mapping[str, Any], path: object, part: str = "", ignored: Iterable[str] = ()
    ) -> None:
        super().__init__({}, "", path)
        self._part = part  # "rope_scaling.", for messages
        self._values = {k: v for k, v in values.items() if v is not None}
        self.ignored = frozenset(ignored)
        self.nulls = values.keys() - self._values.keys()

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def numbers(self, key: str) -> list[float]:
        """An array of finite numbers; empty when there is none."""
        value = self._value(key, ())
        good = isinstance(value, (list, tuple)) and all(type(x) in (int, float) for x in value)
        if not good or not all(abs(x) < 1e12 for x in value):
            raise self._wrong(key, value, "an array of numbers")
        return [float(x) for x in value]

    def part(self, key: str, more: Mapping[str, Any] | None = None) -> CheckpointSettings:
        """The object below a key, with `more` where it says nothing; empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        given = {k: v for k, v in value.items() if v is not None}
        return CheckpointSettings({**(more or {}), **given}, self.path, f"{key}.", self.ignored)

    def refuse_unread(self) -> None:
        """UnsupportedModel naming the settings that nobody read; what is off asks for nothing."""
        known = self._read | HARMLESS | self.ignored
        unread = {k: v for k, v in self._values.items() if k not in known and v}
        if unread:
            first = list(unread.items())[:4]
            said = ", ".join(f"{self._part}{escaped(k)} = {short(v)}" for k, v in first)
            raise UnsupportedModel(
                f"{self.path}: not supported: {said}{', ...' if len(unread) > 4 else ''};"
                " if it changes nothing, say --ignore-setting NAME"
            )

    def refuse(self, key: str, why: str) -> UnsupportedModel:
        """The error for a value that cannot be converted."""
        value = self._values.get(key)
        return UnsupportedModel(f"{self._at(key)} = {short(value)} is not supported: {why}")

    def _at(self, key: str) -> str:
        return f"{self.path}: {self._part}{key}"


@dataclass(frozen=True, eq=False)
class Transform:
    """How a tensor of a file is made of a checkpoint's."""

    rows: NDArray[np.intp] | None = None  # of the checkpoint, in the file's order
    n_rows: int | None = None  # of the checkpoint's tensor, if not all of them are the file's
    columns: NDArray[np.intp] | None = None
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None  # of each number


@dataclass(frozen=True)
class HuggingFace:
    """Checkpoints of one architecture: their classes, settings, and where its tensors are."""

    # Of config.json's "architectures", each with transformers' values of the settings that a
    # config.json may leave out
    classes: Mapping[str, Mapping[str, Any]]
    settings: Callable[[CheckpointSettings], Metadata]
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    outside: Mapping[str, str] = field(default_factory=lambda: GLOBAL)
    # Tensors that are made of settings: rope's factors
    tensors: Callable[[CheckpointSettings], dict[str, NDArray[np.float32]]] = lambda s: {}
    permuted: tuple[str, ...] = ()
    norm_offset: float = 0.0  # what files have more than checkpoints, but not in ssm_norm
    transforms: Callable[[LayerSizes], Mapping[str, Transform]] = lambda sizes: {}  # by stem
    # tie_word_embeddings, where config.json does not say; None: as there is an output matrix
    tied: bool | None = False
    inserted: str = ""  # what names of the text model have in them beside other models
    others: tuple[str, ...] = ()  # how the names of those begin
    # Tensors of all experts are transposed; rows of gate and up take turns there
    transposed: bool = False
    interleaved: bool = False
    together: bool = False  # files have gate and up of all experts in one tensor
    characters: bool = False  # its tokens are merged of characters, not of bytes or pieces
    nextn: tuple[str, ...] = ()  # settings with the number of blocks behind the layers: left out
    beside: tuple[str, ...] = ()  # settings of those that the text model's file has to have


# Settings that most have


def sizes(s: CheckpointSettings, layer_norm: bool = False, is_dense: bool = True) -> Metadata:
    """Widths and counts; UnsupportedModel unless attention looks back only. layer_norm: norms are
    layer norms, whose eps has names of its own. is_dense: there is a width of feed-forwards.
    """
    s.only("is_causal", True)
    n_head = s.integer("num_attention_heads", high=MAX_HEADS)
    n_head_kv = s.integer("num_key_value_heads", n_head, high=MAX_HEADS)
    return {
        "block_count": ("u32", s.integer("num_hidden_layers", high=MAX_LAYERS)),
        "context_length": ("u32", s.integer("max_position_embeddings", high=MAX_CONTEXT)),
        "embedding_length": ("u32", s.integer("hidden_size")),
        **({"feed_forward_length": ("u32", s.integer("intermediate_size"))} if is_dense else {}),
        "attention.head_count": ("u32", n_head),
        "attention.head_count_kv": ("u32", n_head_kv),
        **_eps(s, layer_norm),
    }


def _eps(s: CheckpointSettings, layer_norm: bool) -> Metadata:
    if layer_norm:
        return {"attention.layer_norm_epsilon": ("f32", s.real("layer_norm_eps", 1e-5, high=1.0))}
    return {"attention.layer_norm_rms_epsilon": ("f32", s.real("rms_norm_eps", 1e-6, high=1.0))}


def head_size(s: CheckpointSettings) -> int:
    """E: head_dim, or D / H."""
    n_head = s.integer("num_attention_heads", high=MAX_HEADS)
    return s.integer("head_dim", s.integer("hidden_size") // n_head)


def head_sizes(s: CheckpointSettings) -> Metadata:
    """Of keys and of values."""
    size = head_size(s)
    return {"attention.key_length": ("u32", size), "attention.value_length": ("u32", size)}


def experts(s: CheckpointSettings) -> Metadata:
    """Counts and widths of experts that every layer has; UnsupportedModel if some have none."""
    s.only("decoder_sparse_step", 1)
    s.only("mlp_only_layers", [])
    found = {
        "expert_count": _count(s, *EXPERT_COUNTS),
        "expert_used_count": _count(s, *USED_COUNTS),
    }
    if s.has("moe_intermediate_size"):
        found["expert_feed_forward_length"] = same_of_layers(s, "moe_intermediate_size")
    return {key: ("u32", n) for key, n in found.items()}


def _count(s: CheckpointSettings, *keys: str) -> int:
    """The first of these counts that there is; all are read."""
    found = [same_of_layers(s, key, high=MAX_EXPERTS) for key in keys if s.has(key)]
    return found[0] if found else s.integer(keys[0])


def same_of_layers(s: CheckpointSettings, key: str, low: int = 1, high: int = MAX_WIDTH) -> int:
    """A whole number, or a list with one that all layers have; UnsupportedModel if they differ."""
    value = s.raw(key)
    if not isinstance(value, list):
        return s.integer(key, low=low, high=high)
    if not value or any(type(x) is not int or x != value[0] for x in value):
        raise s.refuse(key, "one number for all layers is")
    if not low <= value[0] <= high:
        raise s.refuse(key, f"numbers between {low} and {high} are")
    return value[0]


def window_of(s: CheckpointSettings) -> int:
    """sliding_window in tokens; 0 where there is none."""
    return s.integer("sliding_window", 0, low=0, high=1 << 31)


def sliding_layers(s: CheckpointSettings) -> list[bool] | None:
    """Which layers have a window, where layer_types says."""
    types = s.raw("layer_types")
    if types is None:
        return None
    known = {"sliding_attention": True, "full_attention": False}
    if not isinstance(types, list) or len(types) != s.integer("num_hidden_layers"):
        raise s.refuse("layer_types", "one type for each layer is")
    if not set(map(str, types)) <= set(known):
        raise s.refuse("layer_types", f"only {' and '.join(known)} are")
    return [known[str(x)] for x in types]


def windows_in_layers(s: CheckpointSettings, period: int) -> list[bool]:
    """Which layers have a window, of layer_types or of a period, whose last layer has none."""
    period = s.integer("sliding_window_pattern", period)
    usual = [(i + 1) % period != 0 for i in range(s.integer("num_hidden_layers"))]
    return sliding_layers(s) or usual


# Rope


def rope_part(
    s: CheckpointSettings, theta: float, kind: str = "full_attention"
) -> CheckpointSettings:
    """Rope's settings in one form: transformers 5 has rope_parameters, perhaps for each type of
    layer, older ones rope_scaling beside rope_theta. UnsupportedModel for several types of layers.
    """
    if not s.has("rope_parameters"):
        return s.part("rope_scaling", {"rope_theta": s.real("rope_theta", theta, low=1.000001)})
    parts = s.part("rope_parameters", {"rope_theta": s.real("rope_theta", theta, low=1.000001)})
    return parts.part(kind, {"rope_theta": theta}) if parts.has(kind) else parts


def rope_kind(rope: CheckpointSettings) -> str:
    """rope_type in the words of today; "default" is no scaling, nor are sections ("mrope")."""
    old = rope.text("type", "default")
    kind = rope.text("rope_type", old)
    return {"su": "longrope", "mrope": "default"}.get(kind, kind)


def rope(
    s: CheckpointSettings,
    theta: float = 10000.0,
    known: Iterable[str] = (),
    usual: Mapping[str, Any] | None = None,
) -> Metadata:
    """Base and scaling: none, linear, YaRN, and Llama 3's, whose factors `rope_freqs` makes.

    known: settings among those of rope that the caller understands. usual: all of them, where
    config.json says none.
    """
    said = usual is None or s.has("rope_parameters") or s.has("rope_scaling")
    part = rope_part(s, theta) if said else s.part("rope_parameters", usual)
    found: Metadata = {"rope.freq_base": ("f32", part.real("rope_theta", low=1.000001))}
    kind = rope_kind(part)
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise part.refuse("rope_type" if part.has("rope_type") else "type", f"{known} are")
    found |= _SCALINGS[kind](part, s)
    known = set(known)
    for key, value in (("partial_rotary_factor", 1), ("truncate", True)):
        if key not in known:
            part.only(key, value)
    for key in known:
        part.raw(key)
    part.refuse_unread()
    return found


def _linear(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    factor = part.real("factor", low=1e-6)
    return {"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", factor)}


def _yarn(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    """Source: Peng et al. 2023; the magnitude that is usual there is implied."""
    factor = part.real("factor", low=1e-6)
    usual = 0.1 * log(max(factor, 1.0)) + 1
    if abs(part.real("attention_factor", usual) - usual) > 1e-6:
        raise part.refuse("attention_factor", f"only the usual {usual:.7g} is")
    n_ctx = s.integer("max_position_embeddings", high=MAX_CONTEXT)
    original = part.integer("original_max_position_embeddings", n_ctx, high=MAX_CONTEXT)
    found: Metadata = {
        "rope.scaling.type": ("str", "yarn"),
        "rope.scaling.factor": ("f32", factor),
        "rope.scaling.original_context_length": ("u32", original),
    }
    for key in ("beta_fast", "beta_slow"):
        if part.has(key):
            found[f"rope.scaling.yarn_{key}"] = ("f32", part.real(key, low=1e-6))
    return found


def _llama3(part: CheckpointSettings, s: CheckpointSettings) -> Metadata:
    llama3_factors(part, 2)  # checks the settings
    return {}


_SCALINGS: dict[str, Callable[[CheckpointSettings, CheckpointSettings], Metadata]] = {
    "default": lambda part, s: {},
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}


def rope_freqs(s: CheckpointSettings) -> dict[str, NDArray[np.float32]]:
    """rope_freqs.weight of models with Llama 3's scaling."""
    part = rope_part(s, 10000.0)
    if rope_kind(part) != "llama3":
        return {}
    return {"rope_freqs.weight": llama3_factors(part, head_size(s))}


def llama3_factors(rope: CheckpointSettings, n_rot: int) -> NDArray[np.float32]:
    """factors[n_rot / 2] that divide frequencies: 1 for fast pairs, `factor` for slow ones, and a
    ramp between, or a step (Llama 4). Source: transformers' _compute_llama3_parameters.
    """
    factor = rope.real("factor", 8.0, low=1e-6)
    low = rope.real("low_freq_factor", 1.0, low=1e-6)
    high = rope.real("high_freq_factor", 4.0, low=1e-6)
    n_ctx = rope.integer("original_max_position_embeddings", 8192, high=MAX_CONTEXT)
    if high < low:
        raise rope.refuse("high_freq_factor", f"low_freq_factor is {low:g}")
    base = rope.real("rope_theta", low=1.000001)
    turns = n_ctx / (2 * pi) * base ** (-np.arange(0, n_rot, 2) / n_rot)  # in that context
    smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
