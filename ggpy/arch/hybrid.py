"""Models with gated delta nets and gated attention: the common parts of Qwen3.5 and Qwen3-Next.

The order of value heads differs: in files of Qwen3.5, value head h belongs to key head h % Hk; in
checkpoints, the value heads of a key head are neighbours. This module knows no single architecture.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..backends.states import Recurrent
from . import hugging_face as hf
from . import llama
from .architecture import Context, LayerSettings, ModelSettings
from .config import MAX_HEAD_SIZE, MAX_HEADS, MAX_LAYERS, LayerSizes
from .layers import attention, delta, moe
from .layers.attention import QK_NORM
from .layers.delta import MAX_SIZE, MAX_TAPS, DeltaSettings
from .layers.dense import DenseSettings
from .layers.moe import MoESettings
from .rope import SECTIONS, stored_sections

USUAL_SECTIONS = [11, 11, 10]
STORED_NORM = "post_attention_norm.weight"  # before the feed-forward, in spite of its name
GATED_Q = {"attn_q.weight": ("H", ("attn_q.weight", "attn_gate.weight"))}
FUSED_NORM = {STORED_NORM: ("ffn_norm.weight",)}
EXPERTS = {**moe.TENSORS, **moe.SHARED, **moe.SHARED_GATE}
ATTENDS = {**attention.TENSORS, **QK_NORM, **attention.GATE}
OTHERS = ("model.visual.", "visual.", "mtp.", "model.mtp.")  # beside the text model
KINDS = ("CausalLM", "ConditionalGeneration")  # classes: of texts, and of images too
DEFAULTS = {
    **{"hidden_size": 4096, "head_dim": 256, "num_hidden_layers": 32, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
DEFAULT_EXPERTS = {
    **{"hidden_size": 2048, "num_key_value_heads": 2, "norm_topk_prob": True},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
SHARE = 0.25  # of a head that rope rotates
FFN = {name: theirs for name, theirs in hf.LAYER.items() if theirs.startswith("mlp.")}
CHECKPOINT = {
    **{k: v for k, v in {**hf.LAYER, **hf.QK_NORM}.items() if v.startswith(("self_attn", "input"))},
    STORED_NORM: "post_attention_layernorm.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
SEPARATE = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
}
UNUSED = (  # of training, of what computes, and of blocks that predict further tokens
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)


def read(c: Context, ffn: DenseSettings | MoESettings, tiled: bool) -> ModelSettings:
    """The sections of rope are read, and not used: in a text all axes have the same position."""
    c.config.raw(SECTIONS)
    c.config.only("ssm.v_head_reordered", tiled)  # in files of Ollama's converter
    attends = llama.attention(c, "neox")
    mixers = [attends if x.recurrent is None else DeltaSettings(tiled) for x in c.sizes.layers]
    return ModelSettings([LayerSettings(mixer, ffn) for mixer in mixers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Heads, rope and states."""
    s.only("hidden_act", "silu", "swish")
    s.only("attn_output_gate", True)
    for key in UNUSED:
        s.raw(key)
    known = ("mrope_section", "mrope_interleaved")
    return {
        **hf.head_sizes(s),
        **hf.partial_rope(s, 1e4, SHARE, known),
        **_states(s),
    }


def sections(s: hf.CheckpointSettings) -> hf.Metadata:
    """Of rope, for the axes of images: four numbers."""
    found = [int(x) for x in hf.rope_part(s, 1e4).numbers("mrope_section")] or USUAL_SECTIONS
    return {SECTIONS: stored_sections(found)}


def experts(s: hf.CheckpointSettings) -> hf.Metadata:
    """Counts and widths of experts, with one more that every token takes."""
    s.only("norm_topk_prob", True)
    width = s.integer("shared_expert_intermediate_size")
    return {**hf.experts(s), moe.SHARED_WIDTH: ("u32", width)}


def _states(s: hf.CheckpointSettings) -> hf.Metadata:
    size = s.integer("linear_key_head_dim", high=MAX_SIZE)
    n_v_head = s.integer("linear_num_value_heads", high=MAX_HEADS)
    value_size = s.integer("linear_value_head_dim", high=MAX_HEAD_SIZE)
    if value_size != size:
        raise s.refuse("linear_value_head_dim", f"only that of keys, {size}, is")
    found = {
        "ssm.conv_kernel": s.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS),
        "ssm.state_size": size,
        "ssm.group_count": s.integer("linear_num_key_heads", high=MAX_HEADS),
        "ssm.time_step_rank": n_v_head,
        "ssm.inner_size": value_size * n_v_head,
        delta.INTERVAL: s.integer(delta.INTERVAL, delta.USUAL_INTERVAL),
    }
    return {**{key: ("u32", n) for key, n in found.items()}, **_layers(s)}


def _layers(s: hf.CheckpointSettings) -> hf.Metadata:
    """Which layers have a state: layer_types says, or the interval."""
    types, n_layer = s.raw("layer_types"), s.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = s.integer(delta.INTERVAL, delta.USUAL_INTERVAL)
    if types is None:
        return {delta.LAYERS: ("arr[bool]", [(i + 1) % interval != 0 for i in range(n_layer)])}
    known = {"linear_attention": True, "full_attention": False}
    if not isinstance(types, list) or len(types) != n_layer:
        raise s.refuse("layer_types", "one type for each layer is")
    if not set(map(str, types)) <= set(known):
        raise s.refuse("layer_types", f"only {' and '.join(known)} are")
    return {delta.LAYERS: ("arr[bool]", [known[str(x)] for x in types])}


# Tensors


def reordered(sizes: LayerSizes) -> dict[str, hf.Transform]:
    """Transforms from a checkpoint to a file, with value heads in the order of files."""
    r = sizes.recurrent
    if r is None:
        return {}
    heads = np.arange(r.n_v_head).reshape(r.n_k_head, -1).T.reshape(-1)
    rows = _rows(heads, r.size)
    values_last = np.concatenate([np.arange(r.channels - len(rows)), rows + r.channels - len(rows)])
    return {
        **{stem: hf.Transform(values_last) for stem in ("attn_qkv", "ssm_conv1d")},
        "attn_gate": hf.Transform(rows),
        **{stem: hf.Transform(heads) for stem in ("ssm_beta", "ssm_alpha", "ssm_dt")},
        "ssm_a": hf.Transform(heads, function=_decay),
        "ssm_out": hf.Transform(columns=rows),
    }


def taken_apart(sizes: LayerSizes) -> dict[str, hf.Transform]:
    """Transforms for Qwen3-Next: heads keep their order, but a checkpoint has q, k, v and z of each
    key head, one head after the other, in one tensor.
    """
    r = sizes.recurrent
    if r is None:
        return {}
    qkv, z = qkvz_rows(r)
    return {
        "attn_qkv": hf.Transform(qkv, len(qkv) + len(z)),
        "attn_gate": hf.Transform(z, len(qkv) + len(z)),
        "ssm_conv1d": hf.Transform(),
        "ssm_a": hf.Transform(function=_decay),
    }


def qkvz_rows(r: Recurrent) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(rows of q, k and v; rows of z) in a matrix with q, k, v and z of one key head after the
    other.
    """
    shares = np.cumsum([0, r.size, r.size, *[r.n_v_head // r.n_k_head * r.size] * 2])
    starts = np.arange(r.n_k_head)[:, None] * shares[-1]
    q, k, v, z = ((starts + np.arange(a, b)).reshape(-1) for a, b in pairwise(shares))
    return np.concatenate([q, k, v]), z


def _decay(log: NDArray[np.float32]) -> NDArray[np.float32]:
    """a of A_log."""
    return -np.exp(log)


def _rows(heads: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """The rows of heads of one size."""
    return (heads[:, None] * size + np.arange(size)).reshape(-1)
