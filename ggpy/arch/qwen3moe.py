"""qwen3moe: qwen3 with experts instead of the dense feed-forward, in every layer."""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, moe
from .layers.attention import QK_NORM
from .layers.moe import MoESettings, read_router
from .qwen2 import read as read_dense
from .qwen2 import settings as dense_settings


def read(c: Context) -> ModelSettings:
    """qwen3's attention; the weights of the chosen experts add up to 1."""
    ffn = MoESettings(read_router(c.config, c.sizes, normalise=True))
    return ModelSettings([LayerSettings(x.mixer, ffn) for x in read_dense(c).layers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """UnsupportedModel for weights that do not add up to 1, and for layers without experts."""
    s.only("norm_topk_prob", True)
    s.only("use_qk_norm", True)
    return {**dense_settings(s), **hf.experts(s)}


ARCHITECTURE = Architecture(
    "qwen3moe",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **QK_NORM},
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "Qwen3MoeForCausalLM": {
                **{"num_key_value_heads": 4, "norm_topk_prob": False, "num_experts": 128},
                **{"num_experts_per_tok": 8, "moe_intermediate_size": 768},
            }
        },
        settings=settings,
        layer={**hf.ATTENTION, **hf.EXPERTS, **hf.QK_NORM},
    ),
)
