"""Settings of most models: widths and counts, also of experts, and windows of layers."""

from __future__ import annotations

from ..config import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from ..expert_sizes import MAX_EXPERTS
from .checkpoint import Metadata
from .names import EXPERT_COUNTS, USED_COUNTS
from .settings import CheckpointSettings


def sizes(s: CheckpointSettings, layer_norm: bool = False, is_dense: bool = True) -> Metadata:
    """Widths and counts; UnsupportedModel unless attention is causal. layer_norm: norms are layer
    norms, whose eps has another name. is_dense: the model has a width of dense feed-forwards.
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
    """The head sizes of keys and of values."""
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
    """The first of these counts that exists; all are read."""
    found = [same_of_layers(s, key, high=MAX_EXPERTS) for key in keys if s.has(key)]
    return found[0] if found else s.integer(keys[0])


def same_of_layers(s: CheckpointSettings, key: str, low: int = 1, high: int = MAX_WIDTH) -> int:
    """A number, or a list of equal numbers for all layers; UnsupportedModel if they differ."""
    value = s.raw(key)
    if not isinstance(value, list):
        return s.integer(key, low=low, high=high)
    if not value or any(type(x) is not int or x != value[0] for x in value):
        raise s.refuse(key, "one number for all layers is")
    if not low <= value[0] <= high:
        raise s.refuse(key, f"numbers between {low} and {high} are")
    return value[0]


def window_of(s: CheckpointSettings) -> int:
    """sliding_window in tokens; 0 if there is none."""
    return s.integer("sliding_window", 0, low=0, high=1 << 31)


def sliding_layers(s: CheckpointSettings) -> list[bool] | None:
    """Which layers have a window by layer_types; None without it."""
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
    """Which layers have a window: by layer_types, or all but the last layer of each period."""
    period = s.integer("sliding_window_pattern", period)
    usual = [(i + 1) % period != 0 for i in range(s.integer("num_hidden_layers"))]
    return sliding_layers(s) or usual
