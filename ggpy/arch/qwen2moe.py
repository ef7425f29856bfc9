"""qwen2moe: qwen2 with experts and a shared expert with a gate."""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, moe
from .layers.moe import MoESettings, read_router
from .qwen2 import read as read_dense
from .qwen2 import settings as dense_settings

SHARED = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}


def read(c: Context) -> ModelSettings:
    """qwen2's attention; the weights of the chosen experts are the softmax's, not normalised."""
    ffn = MoESettings(read_router(c.config, c.sizes))
    return ModelSettings([LayerSettings(x.mixer, ffn) for x in read_dense(c).layers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """UnsupportedModel for weights that add up to 1, and for layers without experts."""
    s.only("norm_topk_prob", False)
    s.only("qkv_bias", True)
    found = {**dense_settings(s), **hf.experts(s)}
    found[moe.SHARED_WIDTH] = ("u32", s.integer("shared_expert_intermediate_size"))
    return found


ARCHITECTURE = Architecture(
    "qwen2moe",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **moe.SHARED, **moe.SHARED_GATE},
    understands=moe.UNDERSTOOD | {moe.SHARED_WIDTH},
    hugging_face=hf.HuggingFace(
        classes={
            "Qwen2MoeForCausalLM": {
                **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
                **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
            }
        },
        settings=settings,
        layer={**hf.ATTENTION, **hf.EXPERTS, **SHARED, **hf.QKV_BIAS},
    ),
)
