"""olmoe: OLMoE-1B-7B: llama with norms of q and k over all heads together, rope of style "neox",
and experts whose weights are the softmax's, not divided by their sum.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, moe
from .layers.attention import WHOLE_QK_NORM
from .layers.moe import MoESettings, read_router


def read(c: Context) -> ModelSettings:
    """All layers are alike."""
    mixer = replace(llama.attention(c, "neox"), norm_whole=True)
    layer = LayerSettings(mixer, MoESettings(read_router(c.config, c.sizes)))
    return ModelSettings([layer] * c.sizes.n_layer)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """UnsupportedModel for weights that add up to 1, and where q, k and v are clipped.

    intermediate_size is the width of an expert, which files do not say a second time.
    """
    s.only("hidden_act", "silu", "swish")
    s.only("norm_topk_prob", False)
    s.only("clip_qkv", 0)
    return {**hf.sizes(s), **hf.rope(s), **hf.experts(s)}


ARCHITECTURE = Architecture(
    "olmoe",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **WHOLE_QK_NORM},
    optional=OUTPUT,
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "OlmoeForCausalLM": {
                **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "vocab_size": 50304},
                **{"num_experts": 64, "num_experts_per_tok": 8},
            }
        },
        settings=settings,
        layer={**hf.ATTENTION, **hf.EXPERTS, **hf.QK_NORM},
    ),
)
