"""granitemoe: Granite 3 with experts, 1B-A400M and 3B-A800M: granite with experts instead of the
dense feed-forward; some have a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from . import granite, llama
from . import hugging_face as hf
from .architecture import OUTPUT, ROPE_FREQS, Architecture, Context, LayerSettings, ModelSettings
from .config import LayerSizes
from .layers import attention, dense, moe
from .layers.moe import MoESettings, read_router

SHARED_WIDTH = "shared_intermediate_size"
NAMES = {  # in checkpoints
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    **{f"ffn_{x}_exps.weight": f"block_sparse_moe.experts.{x}_proj.weight" for x in hf.PARTS},
    **{f"ffn_{x}_shexp.weight": "shared_mlp.input_linear.weight" for x in ("gate", "up")},
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
}


def read(c: Context) -> ModelSettings:
    """granite's layers; the weights of the chosen experts add up to 1."""
    found = granite.read(c)
    ffn = MoESettings(read_router(c.config, c.sizes, normalise=True))
    return replace(found, layers=[LayerSettings(x.mixer, ffn) for x in found.layers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """intermediate_size is the width of an expert, which files do not say a second time."""
    found = {**granite.settings(s), **hf.experts(s)}
    if width := s.integer(SHARED_WIDTH, 0, low=0):
        found[moe.SHARED_WIDTH] = ("u32", width)
    return found


def transforms(sizes: LayerSizes) -> Mapping[str, hf.Transform]:
    """Gate and up of the shared expert are one tensor, gate first."""
    n, rows = sizes.n_ff_shared, np.arange(2 * sizes.n_ff_shared)
    return {
        "ffn_gate_shexp": hf.Transform(rows[:n], 2 * n),
        "ffn_up_shexp": hf.Transform(rows[n:], 2 * n),
    }


DEFAULTS = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
ARCHITECTURE = Architecture(
    "granitemoe",
    read,
    layer={**attention.TENSORS, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **moe.TENSORS, **moe.SHARED},
    optional={**OUTPUT, **ROPE_FREQS},
    optional_layer=llama.BIASES,
    understands=granite.ARCHITECTURE.understands
    | moe.UNDERSTOOD
    | {moe.SHARED_COUNT, moe.SHARED_WIDTH},
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), DEFAULTS),
        settings=settings,
        layer={**hf.ATTENTION, **NAMES},
        tensors=hf.rope_freqs,
        permuted=hf.PERMUTED,
        transforms=transforms,
    ),
)
