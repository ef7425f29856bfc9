"""qwen3next: Qwen3-Next and Qwen3-Coder-Next: the ancestor of qwen35moe, whose value heads stand
beside their key head, and whose gates of a key head are in one tensor.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import hybrid
from .architecture import Architecture, Context, ModelSettings
from .layers import delta, moe
from .layers.moe import MoESettings, read_router
from .qwen2moe import SHARED

BETA_ALPHA = "ssm_ba.weight"


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1."""
    router = read_router(c.config, c.sizes, normalise=True)
    return hybrid.read(c, MoESettings(router), tiled=False)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """Rope has no sections."""
    return {**hf.sizes(s), **hybrid.experts(s), **hybrid.settings(s)}


ARCHITECTURE = Architecture(
    "qwen3next",
    read,
    layer={**hybrid.ATTENDS, **hybrid.EXPERTS},
    recurrent_layer={**delta.TENSORS, **hybrid.EXPERTS},
    fused=hybrid.FUSED_NORM,
    turns={**hybrid.GATED_Q, BETA_ALPHA: ("Hk", ("ssm_beta.weight", "ssm_alpha.weight"))},
    behind=hybrid.BEHIND_EXPERTS,
    understands=hybrid.UNDERSTOOD | moe.UNDERSTOOD | {moe.SHARED_WIDTH},
    hugging_face=hf.HuggingFace(
        classes={
            "Qwen3NextForCausalLM": {
                **{**hybrid.DEFAULTS, **hybrid.DEFAULT_EXPERTS, "vocab_size": 151936},
                **{"num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10},
                "intermediate_size": 5632,
            }
        },
        settings=settings,
        layer={
            **{**hybrid.CHECKPOINT, **hf.EXPERTS, **SHARED},
            "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight",
            "attn_gate.weight": "linear_attn.in_proj_qkvz.weight",
            BETA_ALPHA: "linear_attn.in_proj_ba.weight",
        },
        transforms=hybrid.taken_apart,
        norm_offset=1.0,
        others=hybrid.OTHERS,
    ),
)
