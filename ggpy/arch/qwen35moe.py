"""qwen35moe: qwen35 with experts and a shared expert with a gate."""

from __future__ import annotations

from . import hugging_face as hf
from . import hybrid
from .architecture import Architecture, Context, ModelSettings
from .layers import delta, moe
from .layers.moe import MoESettings, read_router
from .qwen2moe import SHARED


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1."""
    router = read_router(c.config, c.sizes, normalise=True)
    return hybrid.read(c, MoESettings(router), tiled=True)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of qwen35, and those of experts."""
    sizes = {**hf.sizes(s, is_dense=s.has("intermediate_size")), **hybrid.experts(s)}
    return {**sizes, **hybrid.settings(s), **hybrid.sections(s)}


DEFAULTS = {
    **{**hybrid.DEFAULTS, **hybrid.DEFAULT_EXPERTS, "vocab_size": 248320},
    **{"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
}
ARCHITECTURE = Architecture(
    "qwen35moe",
    read,
    layer={**hybrid.ATTENDS, **hybrid.EXPERTS},
    recurrent_layer={**delta.TENSORS, **hybrid.EXPERTS},
    fused=hybrid.FUSED_NORM,
    turns=hybrid.GATED_Q,
    optional_layer={},
    understands=moe.UNDERSTOOD | {moe.SHARED_WIDTH},
    hugging_face=hf.HuggingFace(
        classes={f"Qwen3_5MoeFor{x}": DEFAULTS for x in hybrid.KINDS},
        settings=settings,
        layer={**hybrid.CHECKPOINT, **hybrid.SEPARATE, **hf.EXPERTS, **SHARED},
        transforms=hybrid.reordered,
        norm_offset=1.0,
        inserted="language_model.",
        others=hybrid.OTHERS,
    ),
)
