"""qwen2vl: the text model of Qwen2-VL and Qwen2.5-VL: qwen2 with sections of rope for the axes of
images. In a text all axes have the same position, so sections change nothing.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import Architecture, Context, ModelSettings
from .qwen2 import read as read_text
from .qwen2 import settings as text_settings
from .qwen3vl import OTHERS
from .rope import SECTIONS, stored_sections

THETA, SECTION = 1e6, "mrope_section"
UNUSED = (  # of images, where settings of the text model stand beside them
    *("vision_config", "vision_token_id", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)


def read(c: Context) -> ModelSettings:
    """Reads the sections of rope, but does not use them."""
    c.config.raw(SECTIONS)
    return read_text(c)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """mrope_section has the number of pairs of each axis; files have four numbers."""
    for key in UNUSED:
        s.raw(key)
    rope = hf.rope_part(s, THETA)
    if not rope.has(SECTION):
        raise rope.refuse(SECTION, "the pairs of each axis are")
    sections = [int(x) for x in rope.numbers(SECTION)]
    return {
        **text_settings(s, THETA, (SECTION,)),
        SECTIONS: stored_sections(sections),
    }


DEFAULTS = {
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 152064},
    **{"max_position_embeddings": 32768, "max_window_layers": 80},
}
ARCHITECTURE = Architecture(
    "qwen2vl",
    read,
    hugging_face=hf.HuggingFace(
        classes=dict.fromkeys(
            ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), DEFAULTS
        ),
        settings=settings,
        layer={**hf.LAYER, **hf.QKV_BIAS},
        inserted="language_model.",
        others=OTHERS,
    ),
)
