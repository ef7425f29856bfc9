"""What architectures say about their checkpoints on the Hugging Face hub, and the words they say it
in. Defaults of settings are those of transformers, whose files leave out what equals them; keys and
values of metadata are those that llama.cpp's converter writes.
"""

from .checkpoint import HuggingFace, Metadata, Transform
from .names import (
    ATTENTION,
    EXPERTS,
    GLOBAL,
    LAYER,
    PARTS,
    PERMUTED,
    QK_NORM,
    QKV_BIAS,
    SANDWICH,
    SHARED,
)
from .rope_settings import (
    ROTATED_SHARE,
    partial_rope,
    rope,
    rope_freqs,
    rope_kind,
    rope_part,
    rotated_share,
)
from .settings import CheckpointSettings
from .size_settings import (
    experts,
    head_size,
    head_sizes,
    same_of_layers,
    sizes,
    sliding_layers,
    window_of,
    windows_in_layers,
)

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "GLOBAL",
    "LAYER",
    "PARTS",
    "PERMUTED",
    "QKV_BIAS",
    "QK_NORM",
    "ROTATED_SHARE",
    "SANDWICH",
    "SHARED",
    "CheckpointSettings",
    "HuggingFace",
    "Metadata",
    "Transform",
    "experts",
    "head_size",
    "head_sizes",
    "partial_rope",
    "rope",
    "rope_freqs",
    "rope_kind",
    "rope_part",
    "rotated_share",
    "same_of_layers",
    "sizes",
    "sliding_layers",
    "window_of",
    "windows_in_layers",
]
