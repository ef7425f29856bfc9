"""qwen3vlmoe: the text model of Qwen3-VL with experts: qwen3moe, as qwen3vl is qwen3."""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import Architecture, Context, ModelSettings
from .layers import attention, moe
from .layers.attention import QK_NORM
from .qwen3moe import read as read_text
from .qwen3vl import DEEP, OTHERS
from .qwen3vl import settings as dense_settings
from .rope import SECTIONS


def read(c: Context) -> ModelSettings:
    """Reads the sections of rope, but does not use them."""
    c.config.raw(SECTIONS)
    c.config.raw(DEEP)
    return read_text(c)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The weights of the chosen experts add up to 1, whether config.json says it or not."""
    s.only("norm_topk_prob", True)
    return {**dense_settings(s), **hf.experts(s)}


ARCHITECTURE = Architecture(
    "qwen3vlmoe",
    read,
    layer={**attention.TENSORS, **moe.TENSORS, **QK_NORM},
    understands=moe.UNDERSTOOD,
    hugging_face=hf.HuggingFace(
        classes={
            "Qwen3VLMoeForConditionalGeneration": {
                **{"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
                **{"moe_intermediate_size": 1408, "vocab_size": 151936},
                **{"max_position_embeddings": 128000},
            }
        },
        settings=settings,
        layer={**hf.ATTENTION, **hf.EXPERTS, **hf.QK_NORM},
        inserted="language_model.",
        others=OTHERS,
        transposed=True,
        beside=("vision_config",),
    ),
)
