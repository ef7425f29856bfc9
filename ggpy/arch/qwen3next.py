"""qwen3next: Qwen3-Next and Qwen3-Coder-Next: the ancestor of qwen35moe. The value heads of a key
head are neighbours, and the gates of a key head are in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from ..gguf import GGUFError, Tensor
from . import hugging_face as hf
from . import hybrid
from .architecture import Architecture, Context, ModelSettings
from .config import Config
from .layers import delta, moe
from .layers.moe import MoESettings, read_router
from .qwen2moe import SHARED

BETA_ALPHA = "ssm_ba.weight"
QKVZ = "ssm_in.weight"  # of files made until December 2025


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1."""
    router = read_router(c.config, c.sizes, normalise=True)
    return hybrid.read(c, MoESettings(router), tiled=False)


def adapt(config: Config, tensors: dict[str, Tensor]) -> None:
    """Splits the matrix of q, k, v and z that old files have, as checkpoints do, into copies."""
    for tensor in [x for name, x in tensors.items() if name.endswith("." + QKVZ)]:
        qkv, z = hybrid.qkvz_rows(delta.read_state(config))
        if tensor.shape[0] != len(qkv) + len(z):
            raise GGUFError(
                f"{tensor.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, its parts have"
                f" {len(qkv) + len(z)}"
            )
        del tensors[tensor.name]
        for part, rows in (("attn_qkv.weight", qkv), ("attn_gate.weight", z)):
            name, shape = tensor.name.replace(QKVZ, part), (len(rows), *tensor.shape[1:])
            tensors[name] = replace(tensor, name=name, shape=shape, data=tensor.data[rows])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file; rope has no sections."""
    return {**hf.sizes(s), **hybrid.experts(s), **hybrid.settings(s)}


ARCHITECTURE = Architecture(
    "qwen3next",
    read,
    layer={**hybrid.ATTENDS, **hybrid.EXPERTS},
    recurrent_layer={**delta.TENSORS, **hybrid.EXPERTS},
    fused=hybrid.FUSED_NORM,
    turns={**hybrid.GATED_Q, BETA_ALPHA: ("Hk", ("ssm_beta.weight", "ssm_alpha.weight"))},
    optional_layer={},
    adapt=adapt,
    understands=moe.UNDERSTOOD | {moe.SHARED_WIDTH},
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
