"""Forms of files that other converters write, or wrote once, beside the tiny models that say the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggpy.arch import hybrid
from ggpy.backends.states import Recurrent
from tools import make_tiny

Tensors = Mapping[str, "np.ndarray | None"]


@dataclass(frozen=True)
class FileForm:
    """What is changed in the file of an architecture, and what in the usual form beside it."""

    architecture: str
    tensors: Callable[[dict[str, np.ndarray]], Tensors] = lambda w: {}
    settings: Mapping[str, Any] = field(default_factory=dict)
    usual_settings: Mapping[str, Any] = field(default_factory=dict)
    usual_tensors: Tensors = field(default_factory=dict)

    def weights(self) -> dict[str, np.ndarray]:
        """Those of the usual form."""
        m = make_tiny.MODELS[self.architecture]
        n_vocab = len(make_tiny.tokenizer(m.tokenizer)["tokenizer.ggml.tokens"])
        found = {**make_tiny.tensors_of(m, n_vocab), **self.usual_tensors}
        return {name: x for name, x in found.items() if x is not None}

    def changed(self) -> dict[str, np.ndarray | None]:
        """The tensors of this form, None for those that it lacks."""
        return {**self.usual_tensors, **self.tensors(self.weights())}


def fused(w: dict[str, np.ndarray]) -> Tensors:
    """q, k and v of each layer, and their biases, in one tensor."""
    found: dict[str, np.ndarray | None] = {}
    for name in [name for name in w if ".attn_q." in name]:
        parts = [name.replace("attn_q", f"attn_{x}") for x in "qkv"]
        found[name.replace("attn_q", "attn_qkv")] = np.concatenate([w[part] for part in parts])
        found |= dict.fromkeys(parts)
    return found


def experts_apart(w: dict[str, np.ndarray]) -> Tensors:
    """A tensor for each expert: the three of an expert one after the other, as in Mixtral's."""
    found: dict[str, np.ndarray | None] = {}
    for x in range(make_tiny.X):
        for name in [name for name in w if "_exps." in name]:
            found[name.replace("_exps", f".{x}")] = w[name][x]
            found[name] = None
    return found


def q_k_v_z_of_each_head(w: dict[str, np.ndarray]) -> Tensors:
    """The first matrices of a gated delta net in one, with their rows as in checkpoints."""
    delta = make_tiny.MODELS["qwen3next"].delta
    assert delta is not None
    qkv, z = hybrid.qkvz_rows(Recurrent(*delta))
    found: dict[str, np.ndarray | None] = {}
    for name in [name for name in w if ".attn_qkv." in name]:
        gate = name.replace("attn_qkv", "attn_gate")
        whole = np.empty((len(qkv) + len(z), w[name].shape[1]), np.float32)
        whole[qkv], whole[z] = w[name], w[gate]
        found |= {name.replace("attn_qkv", "ssm_in"): whole, name: None, gate: None}
    return found


def with_axes_of_one(w: dict[str, np.ndarray]) -> Tensors:
    """Vectors as matrices of one row."""
    return {name: x[None] for name, x in w.items() if x.ndim == 1 and name.endswith(".weight")}


def block_behind(w: dict[str, np.ndarray]) -> Tensors:
    """The last layer again, with a head of its own, and what nobody knows."""
    block = {k.replace("blk.1.", "blk.2."): x for k, x in w.items() if "blk.1." in k}
    names = ("eh_proj", "enorm", "another_norm")
    return block | {f"blk.2.nextn.{name}.weight": np.ones(64, np.float32) for name in names}


def of_images(w: dict[str, np.ndarray]) -> Tensors:
    names = ("v.blk.0.attn_q.weight", "mm.input_projection.weight", "a.conv1d.1.weight")
    return {name: np.ones((4, 32), np.float32) for name in names}


MIXTRAL = {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 32}
OLLAMA = {
    **{"norm_top_k_prob": True, "ssm.v_head_reordered": True, "image_token_id": 5},
    **{"rope.mrope_section": [1, 1, 1], "rope.mrope_interleaved": True, "vision.block_count": 2},
}
GEMMA3 = {
    **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
    **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
}
FORMS = {
    "fused q, k, v": FileForm("qwen2", fused),
    "fused q, k, v beside gated delta nets": FileForm("qwen35", fused),
    "experts apart": FileForm(
        "llama", experts_apart, MIXTRAL, MIXTRAL, make_tiny.experts_of("llama")
    ),
    "q, k, v, z of each head": FileForm("qwen3next", q_k_v_z_of_each_head),
    "axes of one": FileForm("qwen2moe", with_axes_of_one),
    "a block after the layers": FileForm(
        "exaone4", block_behind, {"block_count": 3, "nextn_predict_layers": 1}
    ),
    "what reads images": FileForm("gemma3", of_images, {"mm.tokens_per_image": 256}),
    "sections of rope": FileForm("glm4moe", settings={"rope.dimension_sections": [2, 1, 1, 0]}),
    "settings of a hybrid": FileForm(
        "granite",
        settings={
            **{"deepstack_mapping": [-1, 0], "expert_count": 0, "ssm.conv_kernel": 4},
            **{"expert_shared_feed_forward_length": 96, "attention.head_count_kv": [2, 2]},
        },
    ),
    "no width of experts": FileForm(
        "qwen2moe", settings={"expert_feed_forward_length": None, "feed_forward_length": 64}
    ),
    "one expert, no groups": FileForm(
        "hunyuan-dense", settings={"expert_count": 1, "expert_group_count": 0}
    ),
    "gemma3 with images of Ollama": FileForm(
        "gemma3",
        of_images,
        dict.fromkeys(GEMMA3) | {"mm.tokens_per_image": 256, "vision.block_count": 27},
        GEMMA3,
    ),
    "a name of Ollama": FileForm("gemma3", settings={"rope.local.freq_base": 1e4}),
    "settings of Ollama": FileForm("qwen35moe", settings=OLLAMA),
}
