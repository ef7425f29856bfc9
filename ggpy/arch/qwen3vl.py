"""qwen3vl: the text model of Qwen3-VL: qwen3, whose rope has sections for the axes of images.

In a text all axes have the same position, so sections change nothing. The features that images add
to the first layers are not used.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import LAYER, Architecture, Context, ModelSettings
from .layers.attention import QK_NORM
from .qwen2 import read as read_text
from .rope import SECTIONS, stored_sections

DEEP = "n_deepstack_layers"
THETA = 5e5
OTHERS = ("model.visual.", "visual.")


def read(c: Context) -> ModelSettings:
    """Reads the sections of rope, but does not use them."""
    c.config.raw(SECTIONS)
    c.config.raw(DEEP)
    return read_text(c)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """mrope_section has the number of pairs of each axis; files have four numbers."""
    s.only("hidden_act", "silu", "swish")
    sections = [int(x) for x in hf.rope_part(s, THETA).numbers("mrope_section")] or [24, 20, 20]
    images = s.part("vision_config")
    found = hf.rope(s, THETA, ("mrope_section", "mrope_interleaved"))
    return {
        **hf.sizes(s),
        **found,
        **hf.head_sizes(s),
        SECTIONS: stored_sections(sections),
        DEEP: ("u32", len(images.numbers("deepstack_visual_indexes"))),
    }


ARCHITECTURE = Architecture(
    "qwen3vl",
    read,
    layer={**LAYER, **QK_NORM},
    hugging_face=hf.HuggingFace(
        classes={
            "Qwen3VLForConditionalGeneration": {
                **{"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936},
                **{"max_position_embeddings": 128000},
            }
        },
        settings=settings,
        layer={**hf.LAYER, **hf.QK_NORM},
        inserted="language_model.",
        others=OTHERS,
        beside=("vision_config",),
    ),
)
