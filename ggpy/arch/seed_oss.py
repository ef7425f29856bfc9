"""seed_oss: qwen2's biases, and a head size of its own. The norm before the feed-forward is stored
under the name that other architectures use for a norm after the attention.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import LAYER, Architecture
from .qwen2 import read

NORM, STORED_AS = "ffn_norm.weight", "post_attention_norm.weight"


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The biases are found among the tensors."""
    s.only("hidden_act", "silu", "swish")
    s.only("attention_out_bias", False)
    s.raw("residual_dropout")  # of training
    return {**hf.sizes(s), **hf.rope(s), **hf.head_sizes(s)}


ARCHITECTURE = Architecture(
    "seed_oss",
    read,
    layer=LAYER,
    fused={STORED_AS: (NORM,)},
    hugging_face=hf.HuggingFace(
        classes={
            "SeedOssForCausalLM": {
                **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
            }
        },
        settings=settings,
        layer={
            **{k: v for k, v in {**hf.LAYER, **hf.QKV_BIAS}.items() if k != NORM},
            STORED_AS: hf.LAYER[NORM],
        },
    ),
)
