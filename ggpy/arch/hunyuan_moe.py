"""hunyuan-moe: Hunyuan-A13B: hunyuan-dense with experts and a shared expert."""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import OUTPUT, Architecture, Context, LayerSettings, ModelSettings
from .hunyuan_dense import NORMS, mixer
from .hunyuan_dense import settings as dense_settings
from .layers import attention, moe
from .layers.attention import QK_NORM
from .layers.moe import MoESettings, read_router
from .rope import read_rope

WIDTH = "moe_intermediate_size"
UNUSED = (  # training, and what belongs to other ways to choose experts
    *("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "n_group"),
    *("topk_group", "routed_scaling_factor", "moe_layer_num_skipped", "kv_lora_rank"),
    *("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
)


def read(c: Context) -> ModelSettings:
    """The weights of the chosen experts add up to 1; the base of rope is stretched in the file."""
    ffn = MoESettings(read_router(c.config, c.sizes, normalise=True))
    layer = LayerSettings(mixer(c, read_rope(c.config, c.sizes, "neox")), ffn)
    return ModelSettings([layer] * c.sizes.n_layer)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Lists have one number for each layer, and all must be equal."""
    s.only("use_mixed_mlp_moe", True)
    s.only("group_limited_greedy", False)
    s.only("use_mla", False)
    s.only("norm_topk_prob", True)
    for key in UNUSED:
        s.raw(key)
    width = s.integer("intermediate_size")  # of experts too, whatever their own says
    if s.has(WIDTH) and hf.same_of_layers(s, WIDTH) != width:
        raise s.refuse(WIDTH, f"intermediate_size is {width}, and experts have the same")
    n_shared = hf.same_of_layers(s, "num_shared_expert") if s.has("num_shared_expert") else 1
    if n_shared != 1:
        raise s.refuse("num_shared_expert", "one is")
    return {
        **{**dense_settings(s), **hf.experts(s)},
        "expert_feed_forward_length": ("u32", width),
        moe.SHARED_WIDTH: ("u32", width),
        moe.SHARED_COUNT: ("u32", 1),
    }


ARCHITECTURE = Architecture(
    "hunyuan-moe",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **moe.SHARED, **QK_NORM},
    optional=OUTPUT,
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.SHARED_WIDTH},
    hugging_face=hf.HuggingFace(
        classes={"HunYuanMoEV1ForCausalLM": {"rms_norm_eps": 1e-5, "moe_topk": 1}},
        settings=settings,
        layer={
            **{**hf.ATTENTION, **NORMS, **hf.EXPERTS},
            "ffn_gate_inp.weight": "mlp.gate.wg.weight",
            **{f"ffn_{x}_shexp.weight": f"mlp.shared_mlp.{x}_proj.weight" for x in hf.PARTS},
        },
    ),
)
